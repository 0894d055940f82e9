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
from pathlib import Path

from fsdp import config as configuration
from fsdp.base.errors import ConfigError
from fsdp.config import Config
from fsdp.config.command_line import RUN_FLAGS, CommandParser, prints_errors


@prints_errors("fsdp.plan")
def main(argv: list[str]) -> int:
    parser = CommandParser("fsdp.plan", __doc__, epilog=f"{configuration.all_fields('plan')}\n\n{RUN_FLAGS}")
    _, flags = parser.parse_with_run_flags(argv)
    config = configuration.load(flags)
    if config.plan.write:
        _check_place(Path(config.plan.write))
    print("\n".join(answer(config, fields_set(flags))))
    return 0


def _check_place(file: Path) -> None:
    """A search may take minutes: what it cannot write to is refused before."""
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        reason = "a folder is there" if file.is_dir() else "its folder is not there, or may not be written"
        raise ConfigError(f"{file} cannot be written ({reason}).", "--plan.write plan.toml")


def fields_set(argv: list[str]) -> frozenset[str]:
    """Fields set in flags or in a recipe that is not a run's full one."""
    names: set[str] = set()
    for name, value in configuration.pair_flags(argv):
        names |= _set_in(value) if name == "config" else {name}
    return frozenset(names)


def _set_in(recipe: str) -> set[str]:
    defaults = {name: spec.default for name, spec in configuration.FIELDS.items()}
    return {
        name
        for name, value in configuration.read_recipe(recipe).items()
        if name not in defaults or defaults[name] != value
    }


def answer(config: Config, given: frozenset[str]) -> list[str]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.filterwarnings("ignore", category=UserWarning)
    from fsdp.plan import report
    from fsdp.plan.estimate import plan_one
    from fsdp.plan.rates import rates_for
    from fsdp.plan.search import search

    rates = rates_for(config)
    if config.plan.fix:
        plans, ranks = [plan_one(config)], 0
    else:
        found = search(config, given)
        plans, ranks = list(found.plans), found.ranks
    best = plans[0]
    subject = (
        f"{ranks or best.sizes.ranks} × {rates.name}, {best.rates.memory / 2**30:.1f} GiB each, margin "
        f"{best.margin:.0%}"
    )
    lines = [subject, "", *report.table(plans), ""]
    lines += [f"  not modelled: {note}" for note in report.notes(best.config)]
    if not best.fits:
        return [*lines, f"  nothing fits. {_hint(config)}"]
    lines += [f"  {line}" for line in report.details(best, config)]
    lines += ["", f"  best: {report.flags_of(best)}"]
    if config.plan.write:
        report.write_recipe(best, config)
        lines.append(
            f"  written: {config.plan.write}; python train.py --config {config.plan.write} --dry-run"
        )
    return lines


def _hint(config: Config) -> str:
    gpus = max(2, config.plan.gpus * 2)
    return f"HINT: --plan.gpus {gpus}, a --plan.gpu with more memory, or --data.seq_len lower"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
