"""Memory and step time of a configuration, without a GPU, before the job is queued.

    python -m fsdp.plan --model.name transformer --model.preset llama-8b --data.seq_len 8192 \\
        --plan.gpus 64 --plan.gpu h100

train.py's flags and recipes (--config FILE), and --plan's own. Flags that are set stay; mesh, micro-batch,
resharding, checkpointing and, where nothing else fits, offload are searched. --plan.fix true plans the flags
as they are; without --plan.gpus the fewest ranks that fit are found. --plan.write FILE writes the best as a
recipe for train.py.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from fsdp import config as configuration
from fsdp.base.errors import ConfigError
from fsdp.config import Config
from fsdp.config.command_line import RUN_FLAGS, CommandParser, prints_errors
from fsdp.config.help import all_fields
from fsdp.rundir.paths import write_atomically


@prints_errors("fsdp.plan")
def main(argv: list[str]) -> int:
    parser = CommandParser("fsdp.plan", __doc__, epilog=f"{all_fields('plan')}\n\n{RUN_FLAGS}")
    _, flags = parser.parse_with_run_flags(argv)
    config = configuration.load(flags)
    file = Path(config.plan.write)
    if config.plan.write and (file.is_dir() or not os.access(file.parent, os.W_OK)):
        # before a search, which may take minutes
        reason = "a folder is there" if file.is_dir() else "its folder is not there, or may not be written"
        raise ConfigError(f"{file} cannot be written ({reason}).", "--plan.write plan.toml")
    print("\n".join(answer(config, fields_set(flags))))
    return 0


def fields_set(argv: list[str]) -> frozenset[str]:
    """Fields set in flags or in a recipe that is not a run's full one."""
    names: set[str] = set()
    for name, value in configuration.pair_flags(argv):
        if name == "config":
            recipe, fields = configuration.read_recipe(value), configuration.FIELDS
            names |= {
                field for field, v in recipe.items() if field not in fields or fields[field].default != v
            }
        else:
            names.add(name)
    return frozenset(names)


def answer(config: Config, given: frozenset[str]) -> Iterator[str]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.filterwarnings("ignore", category=UserWarning)
    from fsdp.plan import text
    from fsdp.plan.estimate import notes, plan_one
    from fsdp.plan.search import search

    plans = [plan_one(config)] if config.plan.fix else search(config, given)
    best = plans[0]
    memory = f"{best.rates.memory / 2**30:.1f} GiB each, margin {best.margin:.0%}"
    yield f"{best.sizes.ranks} × {best.rates.name}, {memory}"
    yield from ("", *text.table(plans), "")
    yield from (f"  not modelled: {note}" for note in notes(best.config))
    if not best.fits:
        gpus = max(2, config.plan.gpus * 2)
        hint = f"--plan.gpus {gpus}, a --plan.gpu with more memory, or --data.seq_len lower"
        yield f"  nothing fits. HINT: {hint}"
        return
    yield from (f"  {line}" for line in text.details(best, config))
    yield from ("", f"  best: {text.flags_of(best)}")
    if config.plan.write:
        write_atomically(Path(config.plan.write), text.recipe(best, config))
        yield f"  written: {config.plan.write}; python train.py --config {config.plan.write} --dry-run"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
