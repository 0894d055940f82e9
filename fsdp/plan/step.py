"""One step as fsdp/loop.py makes it, on real or fake tensors, marked where its phases and blocks begin.

The order is the loop's: micro-batches forward and backward, the norm, the clip, the optimizer. Loader, saves and what is
printed are not a step's. Not here: what is done with what was seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp.agree import Sum
from fsdp.gradients import Gradients
from fsdp.loss import LossFunction
from fsdp.models.blocks import blocks_of
from fsdp.plan.track import Tracker, kind, watching
from fsdp.shard import Sharded

Micro = tuple[Mapping[str, Tensor], Tensor]
"""The tensors of a micro-batch, and which of its rows count."""

OTHER_UNITS = 1_000_000
"""Groups of units that are not blocks are numbered from here; 0 is the root's."""


@dataclass
class Watched:
    """What the loop has before its first step, and the tracker that looks on."""

    sharded: Sharded
    loss_function: LossFunction
    optimizer: torch.optim.Optimizer
    clip: float
    scaled: bool
    tracker: Tracker
    blocks: list[nn.Module] = field(init=False)
    micro: int = 0

    def __post_init__(self) -> None:
        self.blocks = blocks_of(self.sharded.units)
        group = self.sharded.mesh.get_group("dp_shard") if self.sharded.sizes.strategy != "ddp" else None
        self.gradients = Gradients(self.sharded.root.parameters(), group)
        self._name_groups()

    def hold_state(self) -> None:
        """Parameters, buffers and the optimizer's state, which were there before the step."""
        root = self.sharded.root
        for parameter in root.parameters():
            self.tracker.hold(parameter.detach(), "parameters")
        for buffer in root.buffers():
            self.tracker.hold(buffer, "buffers")
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self.tracker.hold(value, "optimizer")

    def step(self, batches: Iterator[Micro], count: int) -> None:
        with watching(self.tracker), self._marked():
            for at in range(count):
                self.micro = at
                with kind(self.tracker, "buffers"):
                    data, valid = next(batches)
                self._micro_batch(data, valid, last=at == count - 1)
                del data, valid
            self._update()

    def _micro_batch(self, data: Mapping[str, Tensor], valid: Tensor, *, last: bool) -> None:
        sharded, tracker = self.sharded, self.tracker
        with sharded.micro_batch(last):
            tracker.mark(self.micro, "forward")
            parts = self.loss_function(sharded.called, data, valid, len(valid))
            total = parts.loss_sum.detach().double()
            if last:
                Sum(total)
            tracker.mark(self.micro, "backward")
            (parts.loss_sum * (sharded.ranks / float(len(valid)))).backward()
        for parameter in sharded.root.parameters():
            if parameter.grad is not None:
                tracker.hold(parameter.grad, "gradients")

    def _update(self) -> None:
        self.tracker.mark(0, "reduce")
        norm = self.gradients.norm()
        if self.scaled:
            self.gradients.scale(0.5)
        if self.clip:
            self.gradients.clip(self.clip, norm)
        self.tracker.mark(0, "optimizer")
        with kind(self.tracker, "optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    # ------------------------------------------------------------ marks

    def _name_groups(self) -> None:
        numbers: dict[nn.Module, int] = {}
        others = 0
        for unit in self.sharded.units:
            if unit[0] in self.blocks:
                number = self.blocks.index(unit[0]) + 1
            else:
                others += 1
                number = OTHER_UNITS + others
            numbers.update(dict.fromkeys(unit, number))
        self.tracker.groups = lambda group: numbers.get(group.modules[0], 0)

    @contextlib.contextmanager
    def _marked(self) -> Iterator[None]:
        """Hooks of ours run before FSDP's own, so that what a block gathers is counted to the block."""
        handles: list[Any] = []
        for at, block in enumerate(self.blocks, 1):
            handles.append(block.register_forward_pre_hook(self._forward_mark(at), prepend=True))
            handles.append(block.register_forward_hook(self._after_forward(at), prepend=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _forward_mark(self, at: int) -> Any:
        def mark(*_: Any) -> None:
            self.tracker.mark(self.micro, "forward", ("start", at))

        return mark

    def _after_forward(self, at: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if at == len(self.blocks):
                self.tracker.mark(self.micro, "forward", ("after", 0))
            for tensor in _outputs(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._backward_mark(at))
                    break

        return hook

    def _backward_mark(self, at: int) -> Any:
        def mark(gradient: Tensor) -> None:
            self.tracker.mark(self.micro, "backward", ("start", at))

        return mark


def _outputs(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for part in output:
            yield from _outputs(part)
    elif isinstance(output, Mapping):
        yield from _outputs(list(output.values()))


def fill_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """The state that an optimizer makes at its first step, made by one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


# ---------------------------------------------------------------- DDP, where its own reducer cannot run


def stand_in_for_ddp(root: nn.Module, sequence: Sequence[nn.Parameter], group: Any) -> list[Tensor]:
    """DDP's reducer is C++ and takes no fake tensors: its buckets are held, gradients copied into them as they come."""
    import torch.distributed as dist

    trained = [p for p in sequence if p.requires_grad]
    buckets: list[Tensor] = []
    views: dict[nn.Parameter, Tensor] = {}
    for dtype in {p.dtype for p in trained}:
        same = [p for p in trained if p.dtype == dtype]
        bucket = torch.zeros(sum(p.numel() for p in same), dtype=dtype)
        at = 0
        for p in same:
            views[p] = bucket[at : at + p.numel()].view_as(p)
            at += p.numel()
        buckets.append(bucket)

    def arrived(parameter: nn.Parameter) -> None:
        assert not isinstance(parameter, DTensor)
        assert parameter.grad is not None
        if parameter.grad is not views[parameter]:
            views[parameter].copy_(parameter.grad)
            parameter.grad = views[parameter]
        if group is not None and group.size() > 1:
            dist.all_reduce(parameter.grad, group=group)

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(arrived)
    return buckets
