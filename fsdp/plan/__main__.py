"""Memory and step time of a configuration, without a GPU, before the job is queued.

    python -m fsdp.plan --model.name transformer --model.preset llama-8b --data.seq_len 8192 \\
        --plan.gpus 64 --plan.gpu h100

train.py's flags and recipes (--config FILE), and --plan's own. Flags that are set stay; mesh, micro-batch,
resharding, checkpointing and, where nothing else fits, further axes, then offload are searched. --plan.fix
true plans the flags as they are; without --plan.gpus the fewest ranks that fit are found. --plan.write FILE
writes the best as a recipe for train.py.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp import config as configuration
from fsdp.base.errors import ConfigError
from fsdp.base.text import columns
from fsdp.config import Config
from fsdp.config.command_line import RUN_FLAGS, CommandParser, all_fields, prints_errors
from fsdp.rundir.history import write_atomically

if TYPE_CHECKING:
    from fsdp.plan.estimate import Plan

GIB = 2**30
ROWS = 12
"""Of the table of plans."""


@prints_errors("fsdp.plan")
def main(argv: list[str]) -> int:
    parser = CommandParser("fsdp.plan", __doc__, epilog=f"{all_fields('plan')}\n\n{RUN_FLAGS}")
    _, flags = parser.parse_with_run_flags(argv)
    config = configuration.load(flags)
    print("\n".join(answer(config, fields_set(flags))))
    return 0


def fields_set(argv: list[str]) -> frozenset[str]:
    """Fields set in flags or in a recipe that is not a run's full one."""
    names, fields = set[str](), configuration.FIELDS
    for name, value in configuration.pair_flags(argv):
        names.add(name)
        if name == "config":
            recipe = configuration.read_recipe(value).items()
            names |= {name for name, v in recipe if name not in fields or fields[name].default != v}
    return frozenset(names)


def answer(config: Config, fixed: frozenset[str]) -> Iterator[str]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.filterwarnings("ignore", category=UserWarning)
    from fsdp.plan.estimate import notes, plan_one, search

    plans = [plan_one(config)] if config.plan.fix else search(config, fixed)
    best = plans[0]
    gib = best.rates.memory / GIB
    unit = "tok" if best.tokens_per_sample else "sample"
    yield f"{best.sizes.ranks} × {best.rates.name}, {gib:.1f} GiB each, margin {config.plan.margin:.0%}"
    head = ["mesh", "reshard", "checkpointing", "micro-batch", "peak GiB", f"fits {gib:.0f}"]
    head += ["step s", f"{unit}/s/GPU", "MFU", "bound by"]
    yield from ("", *(f"  {line}" for line in columns([head, *map(_row, plans[:ROWS])])), "")
    yield from (f"  not modelled: {note}" for note in notes(best.config))
    if not best.fits:
        gpus = max(2, config.plan.gpus * 2)
        hint = f"--plan.gpus {gpus}, a --plan.gpu with more memory, or a lower --data.seq_len"
        yield f"  nothing fits. HINT: {hint}"
        return
    for axis in (axis for axis in best.axes if getattr(config.mesh, axis) == 1):
        row = f"one row of {best.tokens_per_sample:,} tokens does not fit otherwise"
        why = row if axis == "context" else "FSDP alone does not fit"
        yield f"  {axis} {getattr(best.sizes, axis)}: {why}"
    yield from (f"  {line}" for line in details(best))
    flags = " ".join(f"--{name} {str(value).lower()}" for name, value in best.searched.items())
    yield from ("", f"  best: {flags}")
    if config.plan.write:
        _write(Path(config.plan.write), recipe(best, config))
        yield f"  written: {config.plan.write}; python train.py --config {config.plan.write} --dry-run"


def _row(plan: Plan) -> list[str]:
    memory, mesh = plan.config.memory, plan.config.mesh
    is_ddp, every = plan.sizes.strategy == "ddp", memory.activation_checkpointing_every
    kind = memory.activation_checkpointing.replace("ops", "per operation")
    kind += f", each {every}." if kind == "full" and every > 1 else ""
    return [
        str(plan.sizes).partition(" ")[2] + (" ddp" if is_ddp else ""),
        "-" if is_ddp else mesh.reshard_after_forward,
        kind + (", offload" if memory.cpu_offload else ""),
        f"{plan.micro_batch}" + (f" × {plan.accumulation}" if plan.accumulation > 1 else ""),
        f"{plan.needed / GIB:.1f}",
        "yes" if plan.fits else "no",
        f"{plan.step.seconds:.3f}",
        f"{plan.tokens_s:,.0f}",
        f"{plan.mfu:.1%}",
        plan.step.bound_by,
    ]


def details(plan: Plan) -> Iterator[str]:
    memory, step = plan.memory, plan.step
    kinds = sorted(memory.kinds.items(), key=lambda item: -item[1])
    shown = [f"{n.replace('_', ' ')} {size / GIB:.2f}" for n, size in kinds if size >= 1e-3 * memory.peak]
    yield f"memory on rank 0, highest in {memory.moment}: {', '.join(shown)}"
    if plan.rates.has_allocator:
        yield (
            f"tensors {memory.peak / GIB:.2f} GiB, held by the allocator {memory.reserved / GIB:.2f}, with "
            f"driver and NCCL {plan.needed / GIB:.2f}"
        )
        host, save = (memory.host + plan.staged) / GIB, plan.staged / GIB
        yield f"on the host, a rank: {host:.2f} GiB, {save:.2f} of it a save's copy"
    parts = sorted(((seconds, name) for name, seconds in step.parts.items() if name != "host"), reverse=True)
    words = [f"{name} {seconds:.3f}" for seconds, name in parts if seconds >= 0.005 * step.seconds]
    yield f"step {step.seconds:.3f} s: {', '.join(words)}; communication not hidden {step.exposed:.3f}"


def recipe(plan: Plan, config: Config) -> str:
    """The user's configuration with the plan in it, and the prediction, for the run's end to compare: the
    peak that the run itself will read, the allocator's of tensors on CUDA, the process's on CPU.
    """
    peak = plan.memory.peak if plan.rates.has_allocator else plan.needed
    predicted = {
        "plan.predicted_peak_gib": round(peak / GIB, 6),
        "plan.predicted_step_s": round(plan.step.seconds, 6),
        "plan.write": "",
        "plan.gpus": plan.sizes.ranks,
    }
    fields = {name.replace(".", "__"): value for name, value in (plan.searched | predicted).items()}
    return configuration.to_toml(configuration.replace(config, **fields))


def _write(file: Path, text: str) -> None:
    try:
        write_atomically(file, text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error}.", "--plan.write plan.toml") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
