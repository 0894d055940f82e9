"""The step of a run (fsdp/run/step.py) on real or fake tensors, with marks where its phases and blocks begin.

Loader, saves and console are no part of it. Not here: what is computed from a trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.base.devices import without_owner
from fsdp.data.types import Batch
from fsdp.dist.shards import tensors_in
from fsdp.models.units import blocks_of
from fsdp.optim.small_states import SmallStateAdam, new_state
from fsdp.parallel.shard import Sharded
from fsdp.plan.tracker import Tracker, kind, trace_fsdp_events
from fsdp.run.step import StepParts, Totals, train_step

OTHER_UNITS = 1_000_000
"""Groups of units that are not blocks are numbered from here; 0 is the root's."""


@dataclass
class TracedSetup:
    """The state of a run before its first step, and the tracker that records its steps."""

    parts: StepParts
    tracker: Tracker
    buckets: Buckets | None = None
    """In place of DDP's reducer, for fake tensors."""
    compiled: bool = False
    """Whether blocks keep for backward what compiled code keeps."""
    blocks: list[nn.Module] = field(init=False)
    micro: int = 0

    def __post_init__(self) -> None:
        self.sharded = self.parts.sharded
        self.blocks = blocks_of(self.sharded.units)
        self.parts = replace(
            self.parts, update=kind(self.tracker, "optimizer")(self.parts.update), enter=self._enter
        )
        self._name_groups()

    def hold_state(self) -> None:
        """Parameters, buffers and the optimizer's state, which were there before the step."""
        root = self.sharded.root
        for parameter in root.parameters():
            self.tracker.hold(parameter.detach(), "parameters")
        for buffer in root.buffers():
            self.tracker.hold(buffer, "buffers")
        for state in self.parts.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self.tracker.hold(value, "optimizer")
        for bucket in self.buckets.tensors if self.buckets else ():
            self.tracker.hold(bucket, "gradients")

    def step(self, batches: Iterator[Batch], count: int) -> None:
        """A traced step of `count` micro-batches, at the rate that the optimizer has."""
        lr = self.parts.optimizer.param_groups[0]["lr"]
        with trace_fsdp_events(self.tracker), self._marked():
            traced = self._traced(batches, count)
            train_step(self.parts, traced, count, step=1, lr=lr, totals=Totals())

    def _traced(self, batches: Iterator[Batch], count: int) -> Iterator[Batch]:
        for self.micro in range(count):
            self._hold_gradients()
            with kind(self.tracker, "buffers"):
                made = [next(batches)]
            yield made.pop()  # the step alone holds it

    def _hold_gradients(self) -> None:
        for parameter in self.sharded.root.parameters():
            if parameter.grad is not None:
                self.tracker.hold(parameter.grad, "gradients")

    def _enter(self, phase: str) -> None:
        if phase == "reduce":
            self._hold_gradients()
        self.tracker.mark(self.micro if phase in ("forward", "backward") else 0, phase)

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
        """Context with hooks that run before FSDP's own, so that a block's gather counts as the block's."""
        handles: list[Any] = []
        self._inside = contextlib.ExitStack()
        for at, block in enumerate(self.blocks, 1):
            handles.append(block.register_forward_pre_hook(self._forward_mark(at), prepend=True))
            handles.append(block.register_forward_hook(self._after_forward(at), prepend=True))
        try:
            yield
        finally:
            self._inside.close()
            for handle in handles:
                handle.remove()

    def _forward_mark(self, at: int) -> Any:
        def mark(module: nn.Module, args: Any) -> None:
            self.tracker.mark(self.micro, "forward", ("start", at))
            if self.compiled:
                self._inside.enter_context(self.tracker.compiled(list(tensors_in(args))))

        return mark

    def _after_forward(self, at: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._inside.close()
            if at == len(self.blocks):
                self.tracker.mark(self.micro, "forward", ("after", 0))
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._backward_mark(at))
                    break

        return hook

    def _backward_mark(self, at: int) -> Any:
        def mark(gradient: Tensor) -> None:
            self.tracker.mark(self.micro, "backward", ("start", at))

        return mark


def fill_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Creates the state that an optimizer makes at its first step, by one step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    if isinstance(optimizer, SmallStateAdam):
        _set_step_counts(optimizer)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _set_step_counts(optimizer: SmallStateAdam) -> None:
    """Sets the step counts: the first step would read them from a tensor."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state[parameter]
        state.update(state or new_state(parameter, optimizer.kind))
        optimizer._counts[parameter] = (state["step"], 0)


# ---------------------------------------------------------------- DDP, where its own reducer cannot run


class Buckets:
    """DDP's reducer is C++ and takes no fake tensors: its buckets are kept here, and gradients are copied
    into them as they arrive.

    Without synchronisation gradients stay beside the buckets until a synchronised micro-batch.
    """

    def __init__(self, sharded: Sharded) -> None:
        self.sharded, self.syncs = sharded, True
        self._plain = sharded.micro_batch
        sharded.micro_batch = self._micro_batch  # type: ignore[method-assign]
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
            parameter.register_post_accumulate_grad_hook(without_owner(self._arrived))

    @contextlib.contextmanager
    def _micro_batch(self, last: bool) -> Iterator[None]:
        """Sharded.micro_batch of a model in DDP."""
        self.syncs = last or self.sharded.accumulate != "last"
        with self._plain(last), self.sharded._autocast():
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
