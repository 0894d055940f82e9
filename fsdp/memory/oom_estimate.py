"""What a micro-batch's activations take, counted on fake tensors in this process: nothing is allocated,
nothing is sent.

The unsharded model runs forward and backward once on a batch of the asked size; every storage that comes is
counted, what no gradient turns out to be is activations. Takes seconds, for a page that is written once.
fsdp/plan counts whole sharded steps; a run that has just failed cannot make it a process group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from fsdp.base.torch_private.fake import FakeTensorMode
from fsdp.memory.account_storages import StorageTracker
from fsdp.memory.account_timeline import Mark
from fsdp.models.loss import LossFunction

Prepare = Callable[[nn.Module], None]
"""Changes a model before it runs: recomputes some of it in backward."""


def activation_bytes(
    model: nn.Module, batch: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype, prepare: Prepare
) -> int:
    """The most that activations hold at one moment. `model` stands on meta and is spent."""
    loss_function = LossFunction(model)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        _place(model, device, dtype)
        prepare(model)
        data = {name: fake.from_tensor(value).to(device) for name, value in batch.items()}
        rows = len(next(iter(data.values())))
        valid = torch.ones(rows, dtype=torch.bool, device=device)
        tracker = StorageTracker(model, None, device="meta")  # which is where a fake tensor's storage lies
        with tracker:
            tracker.phase(Mark(0.0, "forward", 1))
            parts = loss_function(model, data, valid, rows)
            tracker.phase(Mark(1.0, "backward", 1))
            parts.loss_sum.backward()
            tracker.phase(Mark(2.0, "end", 1))
    return max(moment.kinds["activations"] for moment in tracker.timeline.moments())


def _place(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Fake parameters and buffers on the device, in what is computed in; a tensor shared by two names stays
    shared.
    """
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            new = torch.empty(tensor.shape, dtype=kind, device=device)
            made[id(tensor)] = (
                nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
            )
        return made[id(tensor)]

    kept = list(chain(model.parameters(), model.buffers()))  # alive, so that no id is given twice
    for module in model.modules():
        own = (module.named_parameters, module.named_buffers)
        for name, tensor in [pair for of in own for pair in of(recurse=False, remove_duplicate=False)]:
            setattr(module, name, fake(tensor))
    del kept
