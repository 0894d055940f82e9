"""Activation memory of a micro-batch, estimated on fake tensors: no allocation, no communication.

The unsharded model runs forward and backward once on a batch of the given size; every new storage that is not
a gradient counts as activations. Takes seconds, once. fsdp/plan simulates whole sharded steps, which needs a
process group that a failed run no longer has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from fsdp.base.torch_private.core import FakeTensorMode
from fsdp.memory.account_storages import StorageTracker
from fsdp.memory.account_timeline import Mark
from fsdp.models.chunked_loss import maybe_chunked
from fsdp.models.loss import CustomLoss, LossFunction

Prepare = Callable[[nn.Module], None]
"""Changes a model before it runs, such as by activation checkpointing."""


def activation_bytes(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    prepare: Prepare,
    loss: CustomLoss | None = None,
    loss_chunk: int = 0,
    z_loss: float = 0.0,
) -> int:
    """Peak bytes of activations. `model` is on the meta device and cannot be used afterwards."""
    head = maybe_chunked(model, loss_chunk, z_loss=z_loss)
    loss_function = LossFunction(model, loss, head, z_loss=z_loss)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        _place(model, device, dtype)
        prepare(model)
        data = {name: fake.from_tensor(value).to(device) for name, value in batch.items()}
        rows = len(next(iter(data.values())))
        valid = torch.ones(rows, dtype=torch.bool, device=device)
        tracker = StorageTracker(model, None, device="meta")  # the device of a fake tensor's storage
        with tracker:
            tracker.phase(Mark(0.0, "forward", 1))
            parts = loss_function(model, data, valid, rows)
            tracker.phase(Mark(1.0, "backward", 1))
            parts.loss_sum.backward()
            tracker.phase(Mark(2.0, "end", 1))
    return max(moment.kinds["activations"] for moment in tracker.timeline.moments())


def _place(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replaces parameters and buffers by fake ones on the device, in `dtype`; tied tensors stay tied."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            new = torch.empty(tensor.shape, dtype=kind, device=device)
            made[id(tensor)] = (
                nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
            )
        return made[id(tensor)]

    kept = list(chain(model.parameters(), model.buffers()))  # kept alive, so that no id is reused
    for module in model.modules():
        own = (module.named_parameters, module.named_buffers)
        for name, tensor in [pair for of in own for pair in of(recurse=False, remove_duplicate=False)]:
            setattr(module, name, fake(tensor))
    del kept
