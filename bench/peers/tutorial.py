"""Training as in PyTorch's FSDP2 tutorial: a model on meta, sharded, filled from a full state dict; explicit
prefetch; blocking DCP.

Written after docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html, with `--explicit-prefetching`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from bench.peers.bare import Bare
from bench.peers.base import CLIP, Given, cross_entropy, make_optimizer, mesh_of, prepare_units, to_meta

PREFETCH = 2


class Tutorial:
    settings = (
        "meta, full state dict on each rank, 2 layers prefetched by hand, unshard() ahead; dcp.save, blocking"
    )

    def __init__(self, given: Given) -> None:
        mesh, model, policy = mesh_of(given), given.model, prepare_units(given)
        full = model.state_dict()
        to_meta(model)
        for unit in given.units:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        _prefetch(list(given.units))
        model.to_empty(device=given.device)
        set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True))
        if hasattr(model, "init_buffers"):
            model.init_buffers(given.device)  # type: ignore[operator]
        self.model, self.optimizer = model, make_optimizer(model)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.model.unshard()  # type: ignore[operator]
        loss = cross_entropy(self.model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def save(self, folder: Path, step: int) -> None:
        Bare.save(self, folder, step)  # type: ignore[arg-type]

    def load(self, folder: Path) -> int:
        return Bare.load(self, folder)  # type: ignore[arg-type]


def _prefetch(layers: list[nn.Module]) -> None:
    for at, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[at + 1 : at + 1 + PREFETCH])  # type: ignore[operator]
        before = layers[max(0, at - PREFETCH) : at][::-1]
        layer.set_modules_to_backward_prefetch(before)  # type: ignore[operator]
