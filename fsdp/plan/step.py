"""One step as fsdp/run/loop.py makes it, on real or fake tensors, marked where its phases and blocks begin.

The order is the loop's: micro-batches forward and backward, the norm, the clip, the optimizer. Loader, saves
and what is printed are not a step's. Not here: what is done with what was seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.dist.collectives import Sum
from fsdp.models.blocks import blocks_of
from fsdp.models.loss import LossFunction
from fsdp.optim.gradients import Gradients
from fsdp.optim.small_states import SmallStateAdam, new_state
from fsdp.parallel.shard import Sharded
from fsdp.plan.fsdp_events import watching
from fsdp.plan.tracker import Tracker, kind

Micro = tuple[Mapping[str, Tensor], Tensor]
"""The tensors of a micro-batch, and which of its rows count."""

OTHER_UNITS = 1_000_000
"""Groups of units that are not blocks are numbered from here; 0 is the root's."""


@dataclass
class TracedSetup:
    """What the loop has before its first step, and the tracker that looks on."""

    sharded: Sharded
    loss_function: LossFunction
    optimizer: torch.optim.Optimizer
    clip: float
    scaled: bool
    tracker: Tracker
    buckets: Buckets | None = None
    """In DDP's place, where tensors are fake."""
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
        for bucket in self.buckets.tensors if self.buckets else ():
            self.tracker.hold(bucket, "gradients")

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
        with (
            sharded.micro_batch(last),
            self.buckets.micro_batch(last) if self.buckets else contextlib.nullcontext(),
        ):
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
    if isinstance(optimizer, SmallStateAdam):
        _begin_counts(optimizer)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _begin_counts(optimizer: SmallStateAdam) -> None:
    """Its first step would read the number of steps from a tensor."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state[parameter]
        state.update(state or new_state(parameter, optimizer.kind))
        optimizer._counts[parameter] = (state["step"], 0)


# ---------------------------------------------------------------- DDP, where its own reducer cannot run


class Buckets:
    """DDP's reducer is C++ and takes no fake tensors: its buckets are held here, gradients copied into them
    as they come.

    Where a micro-batch is not synchronised DDP looks away, and gradients lie beside the buckets until one is.
    """

    def __init__(self, sharded: Sharded) -> None:
        self.sharded, self.syncs = sharded, True
        self._group: Any = sharded.mesh.get_group("dp_replicate")
        trained = [p for p in sharded.root.parameters() if p.requires_grad]
        self.tensors: list[Tensor] = []
        self._views: dict[nn.Parameter, Tensor] = {}
        for dtype in dict.fromkeys(p.dtype for p in trained):
            same = [p for p in trained if p.dtype == dtype]
            bucket = torch.zeros(sum(p.numel() for p in same), dtype=dtype)
            self.tensors.append(bucket)
            parts = bucket.split([p.numel() for p in same])
            self._views.update((p, part.view_as(p)) for p, part in zip(same, parts, strict=True))
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """What Sharded.micro_batch does for a model in DDP."""
        self.syncs = last or self.sharded.accumulate != "last"
        with self.sharded._autocast():
            yield

    def _arrived(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        if not self.syncs:
            return
        view = self._views[parameter]
        if parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view
        if self._group.size() > 1:
            dist.all_reduce(parameter.grad, group=self._group)
