"""DDP around a model whose weights are real, with buckets that are the same after a resume."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp.models.init import persistent
from fsdp.shard.shard import Sharded


def replicate(sharded: Sharded) -> None:
    """Applies DDP after the weights are real and equal, without its own broadcast at the start."""
    if sharded.sizes.strategy != "ddp":
        return
    for parameter in sharded.root.parameters():
        if not parameter.numel():
            parameter.requires_grad_(False)  # DDP would wait for a gradient of nothing
    trains = any(p.requires_grad for p in sharded.root.parameters())
    assert trains, "DDP refuses a model with nothing to train"
    runs = DistributedDataParallel(
        sharded.root,
        device_ids=[sharded.device.index] if sharded.device.type == "cuda" else None,
        process_group=sharded.mesh.get_group("dp_replicate"),
        init_sync=False,
        gradient_as_bucket_view=True,
        find_unused_parameters=False,
        static_graph=False,
    )
    # Rank 0's go to all before each forward, which costs a small model as much as its gradients: constants
    # need it not. Set here: as an argument it has one name in torch 2.11 and another in 2.13, which warns of
    # the first.
    buffers = {name for name, _ in sharded.root.named_buffers()}
    runs.broadcast_buffers = not buffers.isdisjoint(persistent(sharded.root))
    if sharded.sizes.ranks > 2:  # the sum of two has one order
        _settle_buckets(runs)
    sharded.runs = runs


class _ParameterSums(nn.Module):
    """Forward returns a sum of each parameter, whose gradient is what the caller gives."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._listed = tuple(parameters)  # not registered: they are the model's

    def forward(self, _: None) -> tuple[torch.Tensor, ...]:
        return tuple(parameter.sum() for parameter in self._listed)


def _settle_buckets(runs: DistributedDataParallel) -> None:
    """A backward of zeros, in the reverse order of definition. Collective.

    DDP divides the gradients into other buckets after a process's first backward, in the order in which they
    came. A sum over three ranks or more is rounded by its place in a bucket: without this, the first step of
    a resumed run had other bits than that step of the run that went on.
    """
    trained = [parameter for parameter in runs.module.parameters() if parameter.requires_grad]
    model, runs.module = runs.module, _ParameterSums(trained)
    try:
        sums = runs(None)  # with a device, DDP's forward needs an argument
        torch.autograd.backward(sums, [torch.zeros_like(one) for one in sums])
    finally:
        runs.module = model
    for parameter in trained:
        parameter.grad = None
