"""A small training run for checkpoint tests: a model that is awkward to save, equal samples on any mesh."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp.checkpoint import Checkpointer
from fsdp.config import CheckpointSection
from fsdp.distributed.env import DistEnv
from fsdp.distributed.mesh import MeshSizes, build_mesh
from fsdp.optim.optimizer import TrainState
from fsdp.rundir.lock import Lock

GLOBAL_BATCH = 12  # 1, 2, 3 and 4 ranks take equal shares
Kind = Literal["fsdp", "hsdp", "ddp"]


class Model(nn.Module):
    """Rows that 2, 3 and 4 do not divide, a tied weight, a parameter that never gets a gradient, a buffer."""

    def __init__(self, width: int = 37, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, width, dtype=dtype)
        self.first = nn.Linear(width, 29, dtype=dtype)
        self.second = nn.Linear(29, width, dtype=dtype)
        self.head = nn.Linear(width, 13, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(5, dtype=dtype))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1  # as BatchNorm counts: forward passes change it, not the optimizer
        return self.head(self.second(torch.tanh(self.first(self.embed(tokens)))))


def mesh_sizes(kind: Kind, ranks: int) -> MeshSizes:
    if kind == "fsdp":
        return MeshSizes("fsdp", 1, ranks)
    return MeshSizes("hsdp", 2, ranks // 2) if kind == "hsdp" else MeshSizes("ddp", ranks, 1)


@dataclass
class Run:
    """The objects that a training loop holds on one rank."""

    env: DistEnv
    state: TrainState
    runs: nn.Module
    checkpointer: Checkpointer

    def step(self) -> float:
        """One optimizer step on this step's samples, sliced over ranks; returns the global mean loss."""
        generator = torch.Generator().manual_seed(1000 + self.state.step)
        tokens = torch.randint(0, 13, (GLOBAL_BATCH, 2), generator=generator)
        mine = tokens[self.env.rank * GLOBAL_BATCH // self.env.world_size :][
            : GLOBAL_BATCH // self.env.world_size
        ]
        loss = nn.functional.cross_entropy(self.runs(mine[:, 0]), mine[:, 1])
        loss.backward()
        self.checkpointer.before_update()
        self.state.optimizer.step()
        self.state.optimizer.zero_grad()
        self.state.step += 1
        self.state.samples += GLOBAL_BATCH
        if self.env.world_size > 1:
            torch.distributed.all_reduce(loss)
        return float(loss.detach()) / self.env.world_size

    def save(self, **more: Any) -> None:
        self.checkpointer.save(self.state, metrics=more.pop("metrics", {}), reason="test", **more)


def build_state(
    env: DistEnv,
    kind: Kind,
    seed: int = 0,
    optimizer: str = "adamw",
    width: int = 37,
    dtype: torch.dtype = torch.float32,
) -> tuple[TrainState, nn.Module, MeshSizes]:
    torch.manual_seed(seed)
    model, sizes = Model(width, dtype), mesh_sizes(kind, env.world_size)
    runs: nn.Module = model
    if kind == "ddp":
        runs = (
            nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
            if env.world_size > 1
            else model
        )
    else:
        mesh = build_mesh(sizes, env.device)
        mesh = mesh if sizes.replicate > 1 else mesh["dp_shard"]
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
    parameters = list(model.parameters())
    made: torch.optim.Optimizer = (
        torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        if optimizer == "sgd"
        else torch.optim.AdamW(parameters, lr=1e-2, fused=optimizer == "fused")
    )
    return TrainState(model, made), runs, sizes


def build(
    env: DistEnv,
    kind: Kind,
    run_dir: str,
    locks: Lock | None = None,
    section: Mapping[str, Any] | None = None,
    **how: Any,
) -> Run:
    state, runs, sizes = build_state(env, kind, **how)
    checkpointer = Checkpointer(
        CheckpointSection(**(section or {})), Path(run_dir), env, sizes, config_hash="c0ffee", locks=locks
    )
    return Run(env, state, runs, checkpointer)


def bits(state: TrainState) -> dict[str, int]:
    """A checksum of every whole tensor and number, to compare runs of any size. Collective."""
    found: dict[str, int] = {}
    for name, tensor in state.model.state_dict().items():
        found[name] = _crc(tensor)
    names: dict[Any, str] = {parameter: name for name, parameter in state.model.named_parameters()}
    for parameter, fields in state.optimizer.state.items():
        for field, value in fields.items():
            found[f"{names[parameter]}.{field}"] = _crc(value)
    return found | {name: hash(value) for name, value in state.counters().items()}


def _crc(tensor: torch.Tensor) -> int:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return zlib.crc32(whole.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


def save_once(
    env: DistEnv,
    kind: Kind,
    run_dir: str,
    steps: int = 3,
    section: Mapping[str, Any] | None = None,
    **how: Any,
) -> dict[str, int]:
    """Train some steps, save, and return the bits saved."""
    run = build(env, kind, run_dir, section=section, **how)
    run.checkpointer.restore(run.state)
    for _ in range(steps):
        run.step()
    run.save(wait=True)
    saved = bits(run.state)
    run.checkpointer.close()
    return saved
