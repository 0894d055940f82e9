"""Plans that these tests make in this process."""

from __future__ import annotations

import functools

from fsdp.config import load
from fsdp.plan.estimate import Plan, plan_one
from fsdp.plan.step_time import GIB

SMALL = (
    "--model.name", "transformer", "--model.args.layers", "3", "--model.args.width", "64",
    "--data.seq_len", "64", "--data.args.kind", "tokens", "--data.name", "synthetic",
)  # fmt: skip
"""Of the transformer's own vocabulary, 256."""


@functools.cache
def plan(*flags: str, gpus: int = 4) -> Plan:
    """The flags as they are, on `gpus` H100 if no flag says otherwise; two samples a rank."""
    batch = () if "--train.global_batch" in flags else ("--train.global_batch", str(2 * gpus))
    return plan_one(load(["--plan.fix", "true", "--plan.gpus", str(gpus), *SMALL, *batch, *flags]))


def mib(size: float) -> float:
    return size / 2**20


__all__ = ["GIB", "SMALL", "mib", "plan"]
