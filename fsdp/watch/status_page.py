"""Status page: shared memory in which a rank writes what it is doing, for its node's monitor to read.

It holds numbers, each a double: the step and phase and since when, the collectives begun and ended, what its
threads are inside of, seconds by phase, and the work of the last 128 steps. After the numbers comes room for
the text of the rank's failure. The training thread writes with plain stores and never waits. A page can still
be read when its rank is stopped, dead or stuck in C code that holds Python's lock. It is a file without a
name (memfd), so that no end of a process leaves one behind.

An aligned double is never read half written. Two of them may be of different moments, and readers allow for
that.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
from dataclasses import dataclass
from typing import Any

from fsdp.base.phases import PHASES, Activity

STACK_SIGNAL = signal.SIGRTMIN + 7
"""Makes faulthandler write a rank's stacks. The C library uses the first real-time signals only."""

PAGE, TEXT_AT = 1 << 18, 8192
LONGEST_TEXT, MOST_RANKS = 4096, 4096
"""Characters of one text of a failure, and ranks that it names: JSON needs twelve bytes for a character at
most, so that four texts have room.
"""

PID, THREAD, STATE, STEP, PHASE, SINCE, BEGUN, ENDED, OP, NUMEL = range(10)
WAITED, STEPS, TEXT, STEP_S, CUDA, MONITOR, PRINTED, ACTIVITY, SAVE_ACTIVITY = range(10, 19)
"""Indices of the numbers. MONITOR: the monitor's process id. PRINTED: 1 once the monitor has printed the
failure. ACTIVITY and SAVE_ACTIVITY: those of the training thread and of the thread that saves in the
background. TEXT: bytes of the text.
"""
TRAINING, OVER, FAILED, LEFT = 1, 2, 3, 4
"""STATE, which is 0 before the first step. LEFT: failed in a process that lives on."""
SPENT = 32
"""From here one number a phase: seconds in it so far, less those in collectives, which WAITED holds."""
RING, RING_STEPS = 128, 128
"""From here RING_STEPS rows of (step, own work in s), step n in row n modulo RING_STEPS."""

OPS = (
    "none", "all_reduce", "all_gather_single", "reduce_scatter_single", "all_gather_into_tensor",
    "reduce_scatter_tensor", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter",
    "all_to_all", "all_to_all_single", "barrier", "all_gather_object", "broadcast_object_list",
    "gather_object", "scatter_object_list", "send", "recv", "monitored_barrier",
)  # fmt: skip


@dataclass(frozen=True)
class StatusPage:
    """The page, as a memory of doubles."""

    descriptor: int
    numbers: memoryview[float]
    page: mmap.mmap

    def close(self) -> None:
        self.numbers.release()
        self.page.close()
        os.close(self.descriptor)

    def write_failure(self, failure: dict[str, Any]) -> None:
        """The length is stored last: a reader finds the whole text or none."""
        data = json.dumps({name: _shortened(value) for name, value in failure.items()}).encode()
        assert len(data) <= PAGE - TEXT_AT
        self.page[TEXT_AT : TEXT_AT + len(data)] = data
        self.numbers[TEXT] = len(data)

    def read_failure(self) -> dict[str, Any] | None:
        length = int(self.numbers[TEXT])
        failure: dict[str, Any] | None = json.loads(self.page[TEXT_AT : TEXT_AT + length]) if length else None
        return failure


def _shortened(value: Any) -> Any:
    """A text's beginning and end; a list's first numbers."""
    if isinstance(value, list):
        return value[:MOST_RANKS]
    if not isinstance(value, str) or len(value) <= LONGEST_TEXT:
        return value
    half = LONGEST_TEXT // 2
    return f"{value[:half]} … {value[-half:]}"


def create() -> StatusPage:
    """Raises OSError without memory for it."""
    descriptor = os.memfd_create("shardrun-page")
    try:
        # a store into a page that has no memory would end this process by SIGBUS
        os.posix_fallocate(descriptor, 0, PAGE)
    except OSError:
        os.close(descriptor)
        raise
    return attach(descriptor)


def attach(descriptor: int) -> StatusPage:
    page = mmap.mmap(descriptor, PAGE)
    return StatusPage(descriptor, memoryview(page)[:TEXT_AT].cast("d"), page)


def read(numbers: memoryview[float]) -> dict[str, Any]:
    """The fields of an Observation that the page holds."""
    n = numbers
    ring = n[RING : RING + 2 * RING_STEPS].tolist()
    return {
        "over": n[STATE] == OVER,
        "step": int(n[STEP]),
        "phase": PHASES[int(n[PHASE])],
        "begun": int(n[BEGUN]),
        "ended": int(n[ENDED]),
        "op": OPS[int(n[OP])],
        "numel": int(n[NUMEL]),
        "cuda": bool(n[CUDA]),
        "activity": Activity(int(n[ACTIVITY])),
        "save_activity": Activity(int(n[SAVE_ACTIVITY])),
        "step_s": n[STEP_S],
        "steps": int(n[STEPS]),
        "work": [(int(step), work) for step, work in zip(ring[::2], ring[1::2], strict=True) if step],
        "spent": {name: n[SPENT + i] for i, name in enumerate(PHASES)} | {"waiting": n[WAITED]},
    }
