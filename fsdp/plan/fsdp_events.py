"""Marks FSDP's own gathers, waits, reductions and the offload of activations in a Tracker.

FSDP's methods are patched while a step is traced (fsdp/base/torch_private/fsdp.py), and restored after. Not
here: what is counted (tracker.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

from fsdp.base.torch_private.core import FakeTensor
from fsdp.base.torch_private.fsdp import (
    AroundMethod,
    Run,
    accumulated_gradient,
    after_resizes,
    around_methods,
    copies_of_offloaded,
    gathered_gradient,
    gathers,
    reduces,
    sharded_gradient,
)
from fsdp.parallel import offload
from fsdp.plan.tracker import Tracker, counted_as


@contextlib.contextmanager
def trace_fsdp_events(tracker: Tracker) -> Iterator[None]:
    """Context in which FSDP's private methods mark gathers, waits, and the owners of gradients."""
    methods = [
        ("unshard", _gathering(tracker)),
        ("wait_for_unshard", _waiting(tracker)),
        ("post_backward", _reducing(tracker)),
        ("finalize_backward", _finishing(tracker)),
    ]
    kept: Any = offload._Kept
    leave = vars(kept)["leave"]
    plain: Any = offload.Tensor
    with around_methods(methods), after_resizes(tracker.resized), copies_of_offloaded(tracker.copies):
        kept.leave = classmethod(_leaving(tracker, leave.__func__))
        if tracker.fake:
            offload.Tensor = FakeTensor  # type: ignore[misc, assignment]  # it asks for the very type
        try:
            with tracker:
                yield
        finally:
            kept.leave, offload.Tensor = leave, plain  # type: ignore[misc]


def _gathering(tracker: Tracker) -> AroundMethod:
    def unshard(group: Any, run: Run) -> Any:
        with counted_as(tracker, "communication", 1, tracker.groups(group), repeat(1)):
            return run()

    return unshard


def _waiting(tracker: Tracker) -> AroundMethod:
    def wait_for_unshard(group: Any, run: Run) -> Any:
        if not gathers(group):
            return run()
        tracker.wait("wait_gather", tracker.groups(group))
        with counted_as(tracker, "gathered", 0, tracker.groups(group)):
            return run()

    return wait_for_unshard


def _reducing(tracker: Tracker) -> AroundMethod:
    def post_backward(group: Any, run: Run) -> Any:
        for parameter in group.fsdp_params:
            gradient = gathered_gradient(parameter)
            if gradient is not None:
                tracker.hold(gradient, "whole_gradients")
        if reduces(group):
            tracker.wait("wait_reduce")
        # the reduction's input is made on the stream of computation, its output on the reductions' own
        with counted_as(tracker, "communication", 0, tracker.groups(group), chain((0,), repeat(2))):
            result = run()
        for parameter in group.fsdp_params:
            _hold_gradients(tracker, parameter)
        return result

    return post_backward


def _hold_gradients(tracker: Tracker, parameter: Any) -> None:
    whole = accumulated_gradient(parameter)
    if whole is not None:
        tracker.hold(whole, "whole_gradients")
    shard = sharded_gradient(parameter)
    if shard is not None:
        tracker.hold(shard, "gradients")


def _leaving(tracker: Tracker, method: Any) -> Any:
    def leave(cls: Any, *args: Any) -> Any:
        made = method(cls, *args)
        if made is not None:
            tracker.hold(made.host, "offloaded")
        return made

    return leave


def _finishing(tracker: Tracker) -> AroundMethod:
    def finalize_backward(group: Any, run: Run) -> Any:
        tracker.wait("wait_all")
        return run()

    return finalize_backward
