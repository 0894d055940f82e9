"""Copies a step's batch to a CUDA device on a separate stream while the previous step computes.

Not here: reading.
"""

from __future__ import annotations

import functools

import torch

from fsdp.data.types import StepBatch


class DevicePrefetch:
    """`send` runs on a reader thread, `receive` on the training thread; the host waits in neither."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _copy_stream(device)

    def send(self, batch: StepBatch) -> StepBatch:
        # A new thread's current device is 0, whatever the process has chosen.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            moved = [micro.to(self._device) for micro in batch.micro]
            return StepBatch(moved, batch.samples, self._stream.record_event())

    def receive(self, batch: StepBatch) -> StepBatch:
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(batch.arrived)
        for micro in batch.micro:
            own = () if micro.sources is None else (micro.sources,)
            for tensor in (*micro.data.values(), micro.valid, *own):
                # Allocated on the copy stream: without this the allocator could reuse the memory while it is
                # still read.
                tensor.record_stream(computing)
        return batch


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the process: each evaluation makes a DevicePrefetch, and torch gives out 32 streams in turn."""
    return torch.cuda.Stream(device)


def maybe_carrier(device: torch.device | None) -> DevicePrefetch | None:
    return DevicePrefetch(device) if device is not None and device.type == "cuda" else None
