"""Each strategy's row of the planner for the models that people ask about, as docs/strategies.md prints it.

    python -m bench.strategies           all models
    python -m bench.strategies 7b        one of them

No GPU is needed: the planner counts a step on fake tensors. The 70B model takes minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp.config import load
from fsdp.plan.estimate import plan_one

GIB = 2**30


@dataclass(frozen=True)
class Subject:
    """A model on named hardware."""

    title: str
    gpus: int
    flags: str


_TOKENS = (
    "--model.name transformer --model.preset {} --data.name synthetic --data.args.kind tokens "
    "--data.seq_len {}"
)
_IMAGES = "--model.name vit --model.preset wide --data.name synthetic --data.args.kind images"
_RECOMPUTED = "--memory.activation_checkpointing full --memory.loss_chunk 1024"
SUBJECTS = {
    "124m": Subject("124M decoder", 8, f"{_TOKENS.format('124m', 1024)} --train.micro_batch 8"),
    "wide": Subject("ViT, 3840 wide", 8, f"{_IMAGES} --train.micro_batch 32"),
    "7b": Subject("7B (Llama 2)", 8, f"{_TOKENS.format('7b', 4096)} {_RECOMPUTED} --train.micro_batch 1"),
    "70b": Subject("70B (Llama 3)", 64, f"{_TOKENS.format('70b', 4096)} {_RECOMPUTED} --train.micro_batch 1"),
}
STRATEGIES = {
    "DDP": "--mesh.strategy ddp",
    "ZeRO-1": "--mesh.strategy fsdp --mesh.reshard_after_forward step",
    "ZeRO-2": "--mesh.strategy fsdp --mesh.reshard_after_forward false --mesh.accumulate shard",
    "ZeRO-3": "--mesh.strategy fsdp --mesh.accumulate shard",
    "HSDP": "--mesh.strategy hsdp --mesh.shard {half} --mesh.accumulate shard",
    "ZeRO-3, offload": "--mesh.strategy fsdp --mesh.accumulate shard --memory.cpu_offload true",
}
MICRO_BATCHES = 4
"""With one, ZeRO-1 and ZeRO-2 are the same."""


def cell(subject: Subject, strategy: str) -> str:
    """What a GPU needs, whether it fits, and the time of a step."""
    half = 8 if subject.gpus > 8 else subject.gpus // 2
    samples = subject.gpus * int(subject.flags.split()[-1]) * MICRO_BATCHES
    words = (
        f"{subject.flags} {STRATEGIES[strategy].format(half=half)} --train.global_batch {samples} "
        f"--plan.fix true --plan.gpus {subject.gpus} --plan.gpu h100"
    )
    plan = plan_one(load(words.split()))
    return f"{plan.needed / GIB:.1f} GiB{'' if plan.fits else ' (no)'}, {plan.step.seconds:.3f} s"


def rows(names: Sequence[str]) -> Iterator[str]:
    """The lines of the table: a column for each model."""
    subjects = [SUBJECTS[name] for name in names]
    yield f"| | {' | '.join(f'{subject.title} on {subject.gpus} × H100' for subject in subjects)} |"
    yield "|---" * (1 + len(subjects)) + "|"
    for strategy in STRATEGIES:
        yield f"| {strategy} | {' | '.join(cell(subject, strategy) for subject in subjects)} |"


def main(argv: Sequence[str]) -> int:
    unknown = [name for name in argv if name not in SUBJECTS]
    if unknown:
        known = ", ".join(SUBJECTS)
        print(
            f"{unknown[0]} is not a model here: {known}. HINT: python -m bench.strategies 7b", file=sys.stderr
        )
        return 2
    for line in rows(argv or list(SUBJECTS)):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
