"""The interface of a contender: what it receives and what it must do. Imports torch alone: a contender's
process imports nothing of shardrun.

A contender wraps one model and takes steps: forward, mean cross entropy, backward, gradients clipped at norm
1, AdamW (fused), gradients freed. `save` and `load` are its own way to store and find its state.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

LR, BETAS, EPS, DECAY, CLIP = 5e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
"""Those of shardrun's own defaults, at a constant rate."""


@dataclass(frozen=True)
class Given:
    """One rank's model with its weights, the same on every rank, and the modules that repeat in it."""

    model: nn.Module
    units: Sequence[nn.Module]
    device: torch.device
    bf16: bool = False
    """Compute in bf16 over fp32 parameters, reduce in fp32; else all in fp32."""
    compile: bool = False
    """torch.compile each unit."""


class Contender(Protocol):
    settings: str

    def __init__(self, given: Given) -> None: ...

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """This rank's mean loss before the update."""
        ...

    def save(self, folder: Path, step: int) -> None:
        """All ranks: store everything that a restart needs."""
        ...

    def load(self, folder: Path) -> int:
        """All ranks: continue from the newest complete save; returns its step, or 0."""
        ...


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Matrices decay, vectors do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=LR, betas=BETAS, eps=EPS, fused=True)


def to_meta(model: nn.Module) -> None:
    """Moves a model to meta and ties again what was tied, as in one built there: Module.to unties it."""
    named = dict(model.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in reversed(named.items())}
    model.to("meta")
    for name, parameter in named.items():
        if (kept := first[id(parameter)]) != name:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, model.get_parameter(kept))


def cross_entropy(logits: Any, targets: Tensor) -> Tensor:
    """In fp32: of bf16 logits the loss would be bf16 too, whose neighbours are 0.06 apart at 10. A model of
    transformers returns them within an output.
    """
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1))


def prepare_units(given: Given) -> Any:
    """Compiles the units if requested; returns the precision for fully_shard."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    for unit in given.units if given.compile else ():
        unit.compile()
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32) if given.bf16 else MixedPrecisionPolicy()


def mesh_of(given: Given) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(given.device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))


def kept(folder: Path, proof: str) -> list[tuple[int, Path]]:
    """Complete saves, the oldest first: `proof` is the file that the way of saving writes last."""
    found = [
        (int(one.name.partition("-")[2]), one) for one in folder.glob("step-*") if one.name[5:].isdigit()
    ]
    return sorted(pair for pair in found if not proof or (pair[1] / proof).exists())


def prune(folder: Path, proof: str, keep: int = 2) -> None:
    """Rank 0 deletes all but the newest."""
    if dist.get_rank() == 0:
        for _, old in kept(folder, proof)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)


def same_everywhere(step: int) -> int:
    """Broadcasts rank 0's newest step."""
    told = torch.tensor(step)
    dist.broadcast(told, src=0)
    return int(told)
