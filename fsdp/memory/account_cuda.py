"""Tracks every block of CUDA's caching allocator, compiled code's too, from the allocator's history.

The history has address, bytes and time of each allocation and release. A block's kind comes from the objects
that own its address at the start of a phase, and from the time windows in which FSDP communicates. A step is
never synchronised; the history is read once, after the last of the chosen steps.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.base.torch_private import core as cuda
from fsdp.base.torch_private.fsdp import Run, around_collectives
from fsdp.memory.account import KINDS, owned_storages
from fsdp.memory.account_storages import ACTIVATIONS
from fsdp.memory.account_timeline import Mark, Timeline

HISTORY = 1_000_000
"""Events kept; torch drops older ones. A step of a 1B model makes tens of thousands."""

Sighting = tuple[float, int, str]
"""(time, address, kind): an object of this kind owned this address at this time."""


class AllocatorTracker:
    """Context manager around the profiled steps; `phase` marks each phase; `timeline` is filled on exit."""

    def __init__(
        self, root: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device, dump: Path
    ) -> None:
        self.timeline = Timeline(KINDS)
        self._root, self._optimizer, self._device, self._dump = root, optimizer, device, dump
        self._marks: list[Mark] = []
        self._windows: list[tuple[float, float]] = []
        self._sightings: list[Sighting] = []
        self._resting: list[tuple[int, int]] = []
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> AllocatorTracker:
        torch.cuda.synchronize(self._device)
        self._resting = live_blocks(cuda.allocator_snapshot(), self._device.index or 0)
        cuda.start_allocator_history(HISTORY)
        self._patches.enter_context(around_collectives(self._timed))
        return self

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        try:
            self.identify()
            torch.cuda.synchronize(self._device)
            cuda.write_allocator_snapshot(self._dump)
            history = cuda.allocator_snapshot()["device_traces"][self._device.index or 0]
        finally:
            cuda.stop_allocator_history()
        fill(self.timeline, self._resting, history, self._marks, self._sightings, self._windows)

    def forget(self) -> None:
        self._sightings.clear()

    def phase(self, mark: Mark) -> None:
        self.identify()
        self._marks.append(Mark(time.time(), mark.phase, mark.step))

    def identify(self) -> None:
        now = time.time()
        for kind, storage in owned_storages(self._root, self._optimizer).values():
            if storage.device.type == "cuda" and storage.nbytes():
                self._sightings.append((now, storage.data_ptr(), kind))

    def _timed(self, run: Run, gradients: Sequence[Tensor]) -> Any:
        began = time.time()
        self._sightings += [(began, g.untyped_storage().data_ptr(), "gradients") for g in gradients]
        try:
            return run()
        finally:
            self._windows.append((began, time.time()))


def live_blocks(snapshot: Mapping[str, Any], device: int) -> list[tuple[int, int]]:
    """(address, bytes) of the allocated blocks in a snapshot."""
    return [
        (block["address"], block["size"])
        for segment in snapshot["segments"]
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]


def fill(
    timeline: Timeline,
    allocated_before: Iterable[tuple[int, int]],
    history: Iterable[Mapping[str, Any]],
    marks: Sequence[Mark],
    sightings: Sequence[Sighting],
    windows: Sequence[tuple[float, float]],
) -> None:
    """Adds blocks, marks and sightings in the order of time; a block's last sighting determines its kind."""
    first = marks[0].time_s if marks else 0.0
    moments: list[tuple[float, int, Any]] = [
        (first, 0, ("alloc", address, size)) for address, size in allocated_before
    ]
    for event in history:
        # free_requested: the tensor was released; free_completed may wait for another stream.
        if event["action"] in ("alloc", "free_requested"):
            moments.append((event["time_us"] / 1e6, 2, (event["action"], event["addr"], event["size"])))
    moments += [(mark.time_s, 1, mark) for mark in marks]
    moments += [(sighting[0], 3, sighting) for sighting in sightings]
    live: dict[int, tuple[int, int]] = {}
    current = "other"
    for at, _, what in sorted(moments, key=lambda moment: moment[:2]):
        if isinstance(what, Mark):
            timeline.mark(what)
            current = "activations" if what.phase in ACTIVATIONS else "other"
        elif what[0] == "alloc":
            block = timeline.block("communication" if _within(windows, at) else current)
            live[what[1]] = (block, what[2])
            timeline.change(at, block, what[2])
        elif what[0] == "free_requested":
            if what[1] in live:
                block, size = live.pop(what[1])
                timeline.change(at, block, -size)
        elif what[1] in live:
            timeline.kind_of[live[what[1]][0]] = what[2]


def _within(windows: Sequence[tuple[float, float]], at: float) -> bool:
    """Windows are in the order of their ends, and FSDP's do not nest."""
    place = bisect_right(windows, at, key=lambda window: window[0]) - 1
    return place >= 0 and at <= windows[place][1]
