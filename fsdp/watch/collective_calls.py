"""Counts the collectives of the training thread on the status page as they begin and end.

torch.distributed's functions are wrapped while a run lasts. FSDP2, our own reductions and users' code call
them as attributes of the module, so one place sees them; DDP's buckets are reduced in C++ and are not seen.
On CPU the time inside is the time that a rank waits for others; on CUDA it is that of the call. Collectives
of another thread pass through uncounted: a save's have an order of their own, and on CUDA those of a backward
run in autograd's thread. There the flight recorder knows them (recorded_calls.py).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdp.watch.status_page import BEGUN, ENDED, NUMEL, OP, OPS, Writer, clock


class CollectiveCounter:
    """The wrappers are installed from the constructor to close()."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._thread = threading.get_ident()
        self._outermost = [True]  # a call that is made of others counts once
        self._count = [0]
        self._originals: dict[str, Any] = {}
        for number, name in enumerate(OPS):
            original = getattr(dist, name, None)
            if original is not None:
                self._originals[name] = original
                setattr(dist, name, self._counted(float(number), original))

    def _counted(self, number: float, original: Callable[..., Any]) -> Callable[..., Any]:
        # All names are local to the closure: this runs in every collective of every step.
        ident, training_thread, tensor, now = threading.get_ident, self._thread, torch.Tensor, clock
        writer, numbers, outermost, counter = self._writer, self._writer.numbers, self._outermost, self._count
        begun_at, ended_at, op_at, numel_at = BEGUN, ENDED, OP, NUMEL

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not outermost[0] or ident() != training_thread:
                return original(*args, **kwargs)
            outermost[0] = False
            counter[0] = count = counter[0] + 1
            numbers[op_at] = number
            numbers[numel_at] = args[0].numel() if args and isinstance(args[0], tensor) else _size(kwargs)
            numbers[begun_at] = count
            began = now()
            try:
                return original(*args, **kwargs)
            finally:
                writer.waited += now() - began
                numbers[ended_at] = count
                outermost[0] = True

        return call

    def close(self) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)
        self._originals = {}


def _size(kwargs: dict[str, Any]) -> int:
    """Of the first tensor given by name; 0 for objects, whose size may differ between ranks."""
    return next((value.numel() for value in kwargs.values() if isinstance(value, torch.Tensor)), 0)
