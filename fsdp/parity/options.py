"""What is compared: meshes of a number of ranks, trainings of each, precisions, bounds, the run's flags.

Not here: how either side trains (reference.py, ranks.py), or the size of a difference (compare.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fsdp import config as configuration
from fsdp.config import Config, OptimSection

BOUNDS = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
PRECISION: Mapping[str, Mapping[str, Any]] = {
    "fp64": {
        "precision.master": "fp64",
        "precision.param": "fp64",
        "precision.reduce": "auto",
        "precision.output": "auto",
    },
    **{
        d: {"precision.master": "fp32", "precision.param": d, "precision.reduce": "auto"}
        for d in ("fp32", "bf16", "fp16")
    },
}
LOSS_SCALE = 256.0
"""For fp16: no gradient overflows. A run would skip such a step; the plain loop has no loss scale."""

PLAIN = {f"optim.{name}": value for name, value in dataclasses.asdict(OptimSection()).items()}
"""Settings of one optimizer are refused beside another."""

FAR = 2.0**20
"""The learning rate of a step from which its gradient is computed; the initial parameter is then rounding."""
CLIP = 2.0**-10
"""A norm to which nearly any gradient is clipped."""


class Comparison(StrEnum):
    """A training of both sides. SGD shows a wrong factor of the gradient; clipping and Adam cancel it."""

    GRADIENT = "gradients"
    CLIPPED = "clipped"
    SGD = "sgd"
    CONFIGURED = "configured"

    def overrides(self) -> dict[str, Any]:
        """SGD has momentum: without optimizer states --memory.nvme optimizer has nothing to move."""
        if self is Comparison.CONFIGURED:
            return {}
        sgd = {
            **PLAIN, "optim.name": "sgd", "optim.momentum": 0.5, "optim.schedule": "constant",
            "optim.warmup_steps": 0,
        }  # fmt: skip
        if self is Comparison.GRADIENT:
            return {**sgd, "optim.lr": FAR, "train.clip_grad_norm": 0.0, "train.steps": 1}
        if self is Comparison.CLIPPED:
            return {**sgd, "optim.lr": FAR / CLIP, "train.clip_grad_norm": CLIP, "train.steps": 1}
        return {**sgd, "optim.lr": 0.01, "train.clip_grad_norm": 0.0, "train.steps": 3}


@dataclass(frozen=True)
class Row:
    """One mesh."""

    strategy: str
    replicate: int
    shard: int
    reshard: str
    micro_batches: int

    @property
    def name(self) -> str:
        return f"{self.strategy}-{self.replicate}-{self.shard}-{self.reshard}-{self.micro_batches}"

    def overrides(self, share: int) -> dict[str, Any]:
        return {
            "mesh.strategy": self.strategy, "mesh.replicate": self.replicate, "mesh.shard": self.shard,
            "mesh.reshard_after_forward": self.reshard, "train.micro_batch": -(-share // self.micro_batches),
        }  # fmt: skip


@dataclass(frozen=True)
class ParityOptions:
    """The run's flags, the number of ranks, the dtype and the number of steps."""

    words: list[str]
    ranks: int
    dtype: str
    steps: int

    def config(self, row: Row | None, folder: str, training: Comparison = Comparison.CONFIGURED) -> Config:
        fixed: dict[str, Any] = {
            "backend": "torchrun", "run.dir": folder, "stop.deadline_s": 0.0,
            "train.steps": self.steps, "train.epochs": 0, "train.stop_after": 0,
            "train.eval_every_steps": 0, "train.eval_every_epochs": 0.0, "train.eval_samples": 1,
            "checkpoint.dir": "", "checkpoint.every_steps": 10**9, "checkpoint.every_minutes": 0.0,
            "checkpoint.every_epochs": 0.0,
            "checkpoint.export": True, "checkpoint.export_format": "torch",
            "checkpoint.export_dtype": "auto",
            "checkpoint.resume": "auto", "checkpoint.keep_best": 0,
            "run.matmul_precision": "highest",  # the plain loop's; TF32 is coarser than the bound of fp32
            "precision.loss_scale": LOSS_SCALE, **PRECISION[self.dtype], **training.overrides(),
        }  # fmt: skip
        given = configuration.load(
            self.words, {**fixed, "mesh.strategy": "auto", "mesh.replicate": 0, "mesh.shard": 0}
        )
        if row is None:
            return given
        share = -(-given.train.global_batch // self.ranks)
        return configuration.load(self.words, {**fixed, **row.overrides(share)})


def rows(ranks: int) -> list[Row]:
    """The meshes of this many ranks, some with several micro-batches."""
    found = [
        Row("fsdp", 1, ranks, "true", 1),
        Row("fsdp", 1, ranks, "false", 2),
        Row("fsdp", 1, ranks, "step", 2),
    ]
    if ranks > 1:
        found += [Row("ddp", ranks, 1, "true", 1), Row("ddp", ranks, 1, "true", 2)]
    if ranks % 2 == 0:
        found += [Row("hsdp", 2, ranks // 2, "true", 1), Row("hsdp", 2, ranks // 2, "true", 2)]
    if ranks % 2 == 0 and ranks > 2:
        found.append(Row("fsdp", 1, ranks, "2", 1))
    return found
