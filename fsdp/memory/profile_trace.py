"""torch's profiler over the chosen steps, and its trace as a table whose parts add up to the step time.

Every moment of a step on this rank is one of

    compute        operations run: kernels on CUDA, operators on the training thread on the CPU
    communication  exposed: a collective runs and nothing is computed; `hidden` is the overlapped rest
    data           the loop waits for a batch
    host           none of these: Python, kernel launches

The trace is read back from the exported file (for Perfetto, chrome://tracing), so both show the same. On CUDA
the host waits for the device at the end of each step that is traced: else it would be steps ahead, and a step
would be the time in which its kernels are queued.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import record_function

from fsdp.base.torch_private.core import verbose_profiler
from fsdp.config import ProfileSection
from fsdp.memory.account_timeline import Mark

PREFIX = "shardrun::"
PARTS = ("compute", "communication", "data", "host")
OPERATORS = ("aten::", "fsdp::", "inductor", "torchao", "Torch-Compiled", "## Call Compiled")
"""Names that count as compute on the CPU. Not autograd's ranges: FSDP's hooks run and wait inside them."""
COLLECTIVES = ("gloo:", "c10d::")
COLLECTIVE_KERNELS = ("ncclKernel", "ncclDevKernel")

OPERATORS_SHOWN = 30
FRAMES_SHOWN = 5
"""Callers of an operation in its row, with --profile.stacks."""

Span = tuple[float, float]


class Tracer:
    """Call begin, then `phase` at every phase, then close."""

    def __init__(self, section: ProfileSection, device: torch.device, *, with_account: bool) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._section, self._device, self._with_account = section, device, with_account
        self._profiler = torch.profiler.profile(
            activities=kinds,
            record_shapes=section.shapes,
            with_stack=section.stacks,
            experimental_config=verbose_profiler() if section.stacks else None,
        )
        self._ranges: list[Any] = []
        self._step = -1

    def begin(self) -> None:
        self._profiler.start()

    def phase(self, mark: Mark) -> None:
        """Ends the previous phase's range and begins this one's, both inside the range of their step."""
        if self._ranges:
            self._ranges.pop().__exit__(None, None, None)
        if mark.step != self._step:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._end_ranges()
            self._step = mark.step
            self._open(f"step {mark.step}")
        self._open(mark.phase)

    def operators(self) -> str:
        """torch's table of the operations that take longest, each with all its calls; with shapes or stacks a
        row for each shape or caller. After `close`.
        """
        own = "self_cuda_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        averages = self._profiler.key_averages(
            group_by_input_shape=self._section.shapes,
            group_by_stack_n=FRAMES_SHOWN if self._section.stacks else 0,
        )
        return str(averages.table(sort_by=own, row_limit=OPERATORS_SHOWN)) + "\n"

    def close(self, path: Path) -> dict[str, Any]:
        self._end_ranges()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(path))
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found = table(json.load(file)["traceEvents"])
        return {**found, "with_account": self._with_account}

    def _open(self, name: str) -> None:
        one = record_function(PREFIX + name)
        one.__enter__()
        self._ranges.append(one)

    def _end_ranges(self) -> None:
        while self._ranges:
            self._ranges.pop().__exit__(None, None, None)


# ---------------------------------------------------------------- from a trace to a table


def table(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """{"steps": [{step, seconds by part, hidden, phases}], "mean": {step, parts}} in seconds."""
    whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
    own = [
        event for event in whole if event["name"].startswith(PREFIX) and event.get("cat") == "user_annotation"
    ]
    on_device = any(event.get("cat") == "kernel" for event in whole)
    device_ranges = [
        event
        for event in whole
        if event["name"].startswith(PREFIX) and event.get("cat") == "gpu_user_annotation"
    ]
    threads = {event["tid"] for event in own}
    computing, communicating = [], []
    for event in whole:
        if _communicates(event, on_device):
            communicating.append(_span(event))
        elif _computes(event, on_device, threads):
            computing.append(_span(event))
    computing, communicating = union(computing), union(communicating)
    steps = [
        _step(event, own, device_ranges, computing, communicating)
        for event in own
        if event["name"].startswith(PREFIX + "step ")
    ]
    count = max(1, len(steps))
    mean = {name: sum(step["seconds"][name] for step in steps) / count for name in ("step", *PARTS)}
    return {"steps": steps, "mean": mean}


def _communicates(event: Mapping[str, Any], on_device: bool) -> bool:
    if on_device:  # a call only queues its kernel; gloo's are the host's, as the votes on stopping
        return event.get("cat") == "kernel" and event["name"].startswith(COLLECTIVE_KERNELS)
    return event["name"].startswith(COLLECTIVES) and event.get("cat") in ("cpu_op", "user_annotation")


def _computes(event: Mapping[str, Any], on_device: bool, threads: set[Any]) -> bool:
    if on_device:
        return event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    return (
        event.get("cat") in ("cpu_op", "user_annotation")
        and event["tid"] in threads
        and event["name"].startswith(OPERATORS)
    )


def _span(event: Mapping[str, Any]) -> Span:
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def _step(
    event: Mapping[str, Any],
    own: Sequence[Mapping[str, Any]],
    device_ranges: Sequence[Mapping[str, Any]],
    computing: Sequence[Span],
    communicating: Sequence[Span],
) -> dict[str, Any]:
    inside = [_span(event)]
    compute = intersect(computing, inside)
    exposed = without(intersect(communicating, inside), compute)
    begin, end = inside[0]
    phases = _phases_within(own, begin, end)
    data = union(span for name, span in phases if name == "data")
    data = without(without(intersect(data, inside), compute), exposed)
    seconds = {
        "step": end - begin,
        "compute": length(compute),
        "communication": length(exposed),
        "data": length(data),
    }
    seconds["host"] = seconds["step"] - sum(seconds[name] for name in PARTS[:3])
    hidden = length(intersect(communicating, inside)) - seconds["communication"]
    return {
        "step": int(event["name"].rpartition(" ")[2]),
        "seconds": seconds,
        "hidden": hidden,
        "phases": _seconds(phases) | _seconds(_phases_within(device_ranges, begin, end)),
    }


def _phases_within(ranges: Sequence[Mapping[str, Any]], begin: float, end: float) -> list[tuple[str, Span]]:
    found = [(one["name"].removeprefix(PREFIX), _span(one)) for one in ranges]
    return [(name, span) for name, span in found if begin <= span[0] < end and not name.startswith("step ")]


def _seconds(phases: Sequence[tuple[str, Span]]) -> dict[str, float]:
    """Of each phase, over all its spans: one on CUDA has one on each stream."""
    names = dict.fromkeys(name for name, _ in phases)
    return {name: length(union(span for one, span in phases if one == name)) for name in names}


# ---------------------------------------------------------------- sets of time spans


def union(spans: Iterable[Span]) -> list[Span]:
    """Sorted, without overlaps."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def intersect(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """a and b are unions."""
    out: list[Span] = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            out.append((begin, end))
        i, j = (i + 1, j) if a[i][1] <= b[j][1] else (i, j + 1)
    return out


def without(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """a without b; both are unions."""
    out: list[Span] = []
    at = 0
    for begin, end in a:
        while at < len(b) and b[at][1] <= begin:
            at += 1
        ahead = at
        while ahead < len(b) and b[ahead][0] < end:
            if begin < b[ahead][0]:
                out.append((begin, b[ahead][0]))
            begin = max(begin, b[ahead][1])
            ahead += 1
        if begin < end:
            out.append((begin, end))
    return out


def length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)
