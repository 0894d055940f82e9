"""Marks FSDP's own gathers, waits, reductions and the offload of activations in a Tracker.

All uses of FSDP's private methods are here, patched while a step is traced and restored after. Not here: what
is counted (tracker.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from fsdp.parallel import offload
from fsdp.plan.tracker import Tracker, counted_as


@contextlib.contextmanager
def watching(tracker: Tracker) -> Iterator[None]:
    """Context in which FSDP's private methods mark gathers, waits, and the owners of gradients."""
    group: Any = _fsdp_param_group.FSDPParamGroup
    saved = {
        name: getattr(group, name)
        for name in ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
    }
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        tracker.resized(storage)
        return result

    group.unshard = _tagged(tracker, saved["unshard"], "communication", stream=1)
    group.wait_for_unshard = _waiting(tracker, saved["wait_for_unshard"])
    group.post_backward = _reducing(tracker, saved["post_backward"])
    group.finalize_backward = _finishing(tracker, saved["finalize_backward"])
    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    kept: Any = offload._Kept
    leave = vars(kept)["leave"]
    kept.leave = classmethod(_leaving(tracker, leave.__func__))
    plain: Any = offload.Tensor
    if tracker.fake:
        offload.Tensor = FakeTensor  # type: ignore[misc, assignment]  # it asks for the very type
    try:
        with tracker:
            yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        kept.leave, offload.Tensor = leave, plain  # type: ignore[misc]
        for name, method in saved.items():
            setattr(group, name, method)


def _tagged(tracker: Tracker, method: Any, kind: str, stream: int) -> Any:
    def unshard(self: Any, *args: Any, **kwargs: Any) -> Any:
        with counted_as(tracker, kind, stream, tracker.groups(self)):
            return method(self, *args, **kwargs)

    return unshard


def _waiting(tracker: Tracker, method: Any) -> Any:
    def wait_for_unshard(self: Any) -> Any:
        if self._all_gather_result is None:
            return method(self)
        tracker.wait("wait_gather", tracker.groups(self))
        with counted_as(tracker, "gathered", 0, tracker.groups(self)):
            return method(self)

    return wait_for_unshard


def _reducing(tracker: Tracker, method: Any) -> Any:
    def post_backward(self: Any, *unused: Any) -> Any:
        for parameter in self.fsdp_params:
            gradient = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
            if gradient is not None:
                tracker.hold(gradient, "whole_gradients")
        if _reduces(self.comm_ctx):
            tracker.wait("wait_reduce")
        with counted_as(tracker, "communication", 0, tracker.groups(self)):
            result = method(self, *unused)
        for parameter in self.fsdp_params:
            _hold_gradients(tracker, parameter)
        return result

    return post_backward


def _reduces(of_all: Any) -> bool:
    """Whether an earlier unit's reduction is in progress. torch 2.11 has one at a time, later ones a list."""
    known = "reduce_scatter_states" if hasattr(of_all, "reduce_scatter_states") else "reduce_scatter_state"
    return bool(getattr(of_all, known))


def _hold_gradients(tracker: Tracker, parameter: Any) -> None:
    whole = getattr(parameter, "unsharded_accumulated_grad", None)
    if whole is not None:
        tracker.hold(whole, "whole_gradients")
    shard = parameter.sharded_param.grad if parameter.sharded_param is not None else None
    if shard is not None:
        tracker.hold(shard, "gradients")


def _leaving(tracker: Tracker, method: Any) -> Any:
    def leave(cls: Any, *args: Any) -> Any:
        made = method(cls, *args)
        if made is not None:
            tracker.hold(made.host, "offloaded")
        return made

    return leave


def _finishing(tracker: Tracker, method: Any) -> Any:
    def finalize_backward(self: Any) -> Any:
        tracker.wait("wait_all")
        return method(self)

    return finalize_backward
