"""Status page: shared memory in which a rank writes what it is doing, for its node's monitor to read. And a
rank's failure: its report, which goes through the page, and how the process then ends.

It holds numbers, each a double: the step and phase and since when, the collectives begun and ended, what its
threads are inside of, seconds by phase, and the work of the last 128 steps. After the numbers comes room for
the text of the rank's failure. The training thread writes with plain stores and never waits. A page can still
be read when its rank is stopped, dead or stuck in C code that holds Python's lock. It is a file without a
name (memfd), so that no end of a process leaves one behind.

An aligned double is never read half written. Two of them may be of different moments, and readers allow for
that. The monitor imports this file: torch is imported where a rank counts.

The report is an exception as plain values: kind, message, ranks at fault, hint, traceback. It tells a failure
of this rank from a consequence of another rank's end (`secondary`). The monitor prints it; the error classes
are in fsdp/base/errors.py.

A launcher that sees a rank end also ends the others, and the terminal may be gone with them. So a rank that
failed first waits for the monitor to print, for PRINT_WAIT_S at most. The interpreter's own teardown comes
after the atexit handlers, and the process ends before it. After a failure it may hang: gloo's threads wait
for a collective that the other ranks never enter, NCCL's for kernels that never end. After success it may
abort: a thread of gloo holds the tensors of a finished collective until it runs again, and on a busy machine
that is in the teardown, where it cannot release them ("terminate called without an active exception", once in
13 runs of `torchrun -m fsdp.predict` on two cores at a load of 15).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import json
import mmap
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp.base import proc
from fsdp.base.errors import OtherRankFailed, ShardrunError, error_number, exception_line, first_line
from fsdp.base.phases import PHASES, SIGNALS, Activity
from fsdp.distributed.env import DistEnv, is_peer_failure
from fsdp.record import STUCK

STACK_SIGNAL = signal.SIGRTMIN + 7
"""Makes faulthandler write a rank's stacks. The C library uses the first real-time signals only."""

PAGE, TEXT_AT = 1 << 18, 8192

PID, THREAD, STATE, STEP, PHASE, SINCE, BEGUN, ENDED, OP, NUMEL = range(10)
WAITED, STEPS, TEXT, STEP_S, CUDA, MONITOR, PRINTED, ACTIVITY, SAVE_ACTIVITY, LEFT_OUT = range(10, 20)
"""Indices of the numbers. MONITOR: the monitor's process id. PRINTED: 1 once the monitor has printed the
failure. ACTIVITY and SAVE_ACTIVITY: those of the training thread and of the thread that saves in the
background. TEXT: bytes of the text. LEFT_OUT: the first collective, as in OP, of which this step has another
in place than the step before it; 0 as long as both are the same.
"""
PROGRESS = (STATE, STEP, SINCE, BEGUN, ENDED)
"""A rank that makes progress changes one of them. SINCE tells two batches of one evaluation apart."""
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
        data = json.dumps(failure, ensure_ascii=False).encode(errors="surrogatepass")
        assert len(data) <= PAGE - TEXT_AT, "failure_report bounds its texts"
        self.page[TEXT_AT : TEXT_AT + len(data)] = data
        self.numbers[TEXT] = len(data)

    def read_failure(self) -> dict[str, Any] | None:
        length = int(self.numbers[TEXT])
        text = self.page[TEXT_AT : TEXT_AT + length].decode(errors="surrogatepass")
        return dict(json.loads(text)) if length else None


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
        "left_out": OPS[int(n[LEFT_OUT])],
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


# ---------------------------------------------------------------- what a rank writes

clock = time.perf_counter
"""Linux's monotonic clock: the same in all processes of a host."""
INDEX = {name: index for index, name in enumerate(PHASES)}
IN_STEP = tuple(name in ("data", "forward", "backward", "reduce", "optimizer") for name in PHASES)
"""A rank's own work in a step. What comes between two steps (a record, a save) does not count."""
AFTER_STEPS = ("evaluate", "save")
"""No part of the time that a step takes: after a long evaluation a hang would be seen hours later."""
IN_ORDER = tuple(name in ("forward", "backward", "reduce") for name in PHASES)
"""Phases with the same collectives in each step."""
ON_DEVICE = tuple(name in ("forward", "backward", "reduce", "optimizer") for name in PHASES)
"""Phases that on CUDA are the device's: the host only queues them."""


class Writer:
    """Writes the training thread's numbers: `phase` and `activity` are listeners of fsdp/base/phases.py."""

    def __init__(self, numbers: memoryview[float]) -> None:
        self.numbers = numbers
        self.waited = 0.0
        self._thread = threading.get_ident()
        self._phase, self._since, self._waited_at = 0, clock(), 0.0
        self._began = self._left = self._work = self._step_s = 0.0
        self._order: list[float] = []
        self._order_before: list[float] = []

    def follow(self, op: float) -> None:
        """Compares a step's next collective with that of the step before. Not on every rank: one that leaves
        out an exchange moves on, and the others wait where nothing differs for them.
        """
        if not IN_ORDER[self._phase]:
            return
        at = len(self._order)
        self._order.append(op)
        before = self._order_before[at : at + 1]
        if before and before != [op] and not self.numbers[LEFT_OUT]:
            self.numbers[LEFT_OUT] = before[0]

    def phase(self, name: str, step: int) -> None:
        n, now, waited, last = self.numbers, clock(), self.waited, self._phase
        work = now - self._since - (waited - self._waited_at)
        if not (n[CUDA] and ON_DEVICE[last]):
            n[SPENT + last] += work
        if IN_STEP[last]:
            self._work += work
        if name == "data":
            self._close_step(step - 1, now)
        elif name in AFTER_STEPS and not self._left:
            self._left = now
        self._phase, self._since, self._waited_at = INDEX[name], now, waited
        n[STEP], n[PHASE], n[SINCE], n[WAITED] = step, self._phase, now, waited

    def _close_step(self, step: int, now: float) -> None:
        n = self.numbers
        if self._began:
            if not n[CUDA]:  # there the device's own clock measures it: DeviceClock
                self.step_took(step, self._work)
            n[STEPS] += 1
            # follows slow steps at once and forgets them slowly
            self._step_s = n[STEP_S] = max((self._left or now) - self._began, 0.95 * self._step_s)
        n[STATE], n[LEFT_OUT] = TRAINING, 0
        self._order_before, self._order = self._order, []
        self._began, self._left, self._work = now, 0.0, 0.0

    def step_took(self, step: int, work: float) -> None:
        """One row of the ring; its step number is stored last."""
        row = RING + 2 * (step % RING_STEPS)
        self.numbers[row + 1] = work
        self.numbers[row] = step

    def activity(self, activity: Activity) -> None:
        """Called on the thread whose activity it is."""
        self.numbers[ACTIVITY if threading.get_ident() == self._thread else SAVE_ACTIVITY] = activity


MOST_OPEN = 64
"""Most steps whose events have not passed yet; the host does not run so far ahead."""


class DeviceClock:
    """A listener of phases in place of the Writer, whose page it completes on CUDA.

    There the host only queues work, so its clock does not measure forward and backward. An event is recorded
    as each phase begins, and around the places where FSDP2 makes the compute stream wait for an all-gather or
    for the last reductions: communication that computation did not hide. Nothing waits for an event; it is
    read once it has passed.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer, self._step = writer, 0
        self._marks: list[tuple[int, Any]] = []
        self._waits: list[tuple[int, Any, Any]] = []
        self._open: deque[tuple[int, list[Any], list[Any]]] = deque(maxlen=MOST_OPEN)

    def phase(self, name: str, step: int) -> None:
        self._writer.phase(name, step)
        index = INDEX[name]
        if self._marks and self._marks[-1][0] == index and name != "data":
            return  # the next batch of an evaluation
        self._marks.append((index, self._recorded()))
        if name == "data":
            self._open.append((self._step, self._marks, self._waits))
            self._step, self._marks, self._waits = step, self._marks[-1:], []
            while self._open and self._open[0][1][-1][1].query():
                self._add(*self._open.popleft())

    def _recorded(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _add(self, step: int, marks: list[tuple[int, Any]], waits: list[tuple[int, Any, Any]]) -> None:
        """As on the CPU the time of a phase is without the waits in it. In the host's phases (an evaluation)
        the host waits for the device, too.
        """
        spans = [(index, began, ended, 1) for (index, began), (_, ended) in itertools.pairwise(marks)]
        numbers, total, waiting = self._writer.numbers, 0.0, 0.0
        for index, began, ended, sign in (*spans, *((*wait, -1) for wait in waits)):
            if step and ON_DEVICE[index]:
                seconds = sign * began.elapsed_time(ended) / 1e3
                numbers[SPENT + index] += seconds
                total += seconds
                waiting -= min(seconds, 0.0)
        if step:
            # of steps that are over: no wait of the host, whose phases keep their time
            self._writer.waited += waiting
            self._writer._waited_at += waiting
            numbers[WAITED] = self._writer.waited
            self._writer.step_took(step, total)

    def timed_waits(self, groups: Any = None) -> AbstractContextManager[None]:
        """Times where the class of FSDP's groups waits; a method that it lacks is not timed."""
        from fsdp.base.torch_private import FSDPParamGroup, around_methods

        methods = dict.fromkeys(("wait_for_unshard", "finalize_backward"), self._timed)
        return around_methods(methods, groups or FSDPParamGroup)

    def _timed(self, group: Any, run: Callable[[], Any]) -> Any:
        if not self._marks or not ON_DEVICE[self._marks[-1][0]]:
            return run()  # before the first step; in an evaluation, whose waits nobody reads
        index, began = self._marks[-1][0], self._recorded()
        try:
            return run()
        finally:
            self._waits.append((index, began, self._recorded()))


# ---------------------------------------------------------------- a rank's failure

TRACE_LINES, LINE_MOST = 30, 1000
MESSAGE_MOST, PRINTED_MOST, RANKS_MOST = 4000, 40_000, 4096
"""Characters of each text (an error may hold that of a whole sample), and ranks: a status page has room for
all, at four bytes a character.
"""
DISK = "free space in the folder above, or --checkpoint.dir elsewhere; the same command resumes"
KNOWN = (
    ("out of memory|[Cc]an(not|'t) allocate memory", "memory",
     "a smaller --train.micro_batch, or --memory.activation_checkpointing full"),
    ("^MemoryError", "memory",
     "less on the host: fewer ranks a node, or smaller pieces in the line above (docs/oom.md)"),
    ("No space left on device|Disk quota exceeded", "full disk", DISK),
    ("Input/output error|Stale file handle|Transport endpoint is not connected", "exception",
     "the storage of this file does not answer as it should: dmesg and its server's log show why"),
    ("device-side assert", "exception",
     "CUDA_LAUNCH_BLOCKING=1 names the line; an index beyond a table is the usual cause"),
    ("No module named '", "exception", "pip install it on every node, or set PYTHONPATH"),
    ("ECC error|illegal memory access|Xid", "exception",
     "the device may be broken: nvidia-smi -q shows its errors; leave its node out"),
)  # fmt: skip
"""Text in an error of torch, CUDA or user code, which carries no value to decide by → kind and hint."""


def failure_report(error: BaseException, env: DistEnv) -> dict[str, Any]:
    """JSON values: they go through the status page, and to another node."""
    ours = isinstance(error, ShardrunError)
    secondary = isinstance(error, OtherRankFailed) or is_peer_failure(error)
    kind, hint = kind_and_hint(error, env)
    return {
        "time": time.time(),
        "kind": kind,
        "message": (str(error) if ours else exception_line(error))[:MESSAGE_MOST],
        "hint": hint,
        "ranks": list(getattr(error, "ranks", ()))[:RANKS_MOST] if ours else [],
        "secondary": secondary,
        "ours": ours,
        "print": printed(error, env)[:PRINTED_MOST],
    }


def kind_and_hint(error: BaseException, env: DistEnv) -> tuple[str, str]:
    """The hint is empty for an error that has its own."""
    if error_number(error) in (errno.ENOSPC, errno.EDQUOT):
        return "full disk", "" if getattr(error, "hint", None) else DISK
    if isinstance(error, ShardrunError):
        return error.verdict, ""
    text = f"{type(error).__name__}: {error}"
    for pattern, kind, hint in KNOWN:
        if re.search(pattern, text):
            return kind, hint
    return "exception", ""


def printed(error: BaseException, env: DistEnv, program: str = "train.py") -> str:
    """For people: one line for an error of ours, and the end of the traceback for any other."""
    if isinstance(error, ShardrunError):
        alone = env.is_main or error.scope == "all"
        return f"{program}{'' if alone else f' (rank {env.rank})'}: {error}"
    if is_peer_failure(error):
        return f"[rank {env.rank}] ended because another rank did: {first_line(error, 160)}"
    hint = kind_and_hint(error, env)[1]
    return f"[rank {env.rank}] failed on {env.device}:\n{_trace(error)}" + (f"\nHINT: {hint}" if hint else "")


def _trace(error: BaseException) -> str:
    lines = [line[:LINE_MOST] for line in "".join(traceback.format_exception(error)).rstrip().splitlines()]
    if len(lines) > TRACE_LINES:
        half = TRACE_LINES // 2
        lines = [*lines[:half], f"  … {len(lines) - TRACE_LINES} lines …", *lines[-half:]]
    return "\n".join(lines)


def write_torchrun_error_file(message: str, *, secondary: bool = False) -> None:
    """torchrun's own summary then ends with this message in place of `error_file: <N/A>`; the first stays."""
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE") or os.devnull)
    if not file.parent.is_dir() or file.exists():
        return
    # Whole seconds, and of equal ones torchrun takes the lower rank's: a consequence is a second later.
    extra = {"py_callstack": message, "timestamp": str(int(time.time()) + secondary)}
    with contextlib.suppress(OSError):  # the message itself is printed
        file.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")


# ---------------------------------------------------------------- the end of the process

PRINT_WAIT_S = 5.0
"""Longer than the monitor waits after a first failure that is no consequence of another."""
EXIT_S = 20.0
"""For non-daemon threads and atexit handlers after a failure; a wandb run takes some seconds to send its last
lines.
"""


class ProcessExit:
    """Ends a process that leaves. Build it before anything registers an atexit handler.

    Handlers are called last in, first out, so this one comes after all others. In a tool, whose imports come
    first, those of the imported modules are left out: they stop helpers that the tool has not started.
    """

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._end)

    def leave(self, code: int) -> int:
        """Returns the exit code, with which the process ends. After a failure, or where a server of records
        has not answered, it ends in EXIT_S at the latest.
        """
        self._code = code
        if code or STUCK.is_set():
            limit = threading.Timer(EXIT_S, self._end)
            limit.daemon = True
            limit.start()
        return code

    def _end(self) -> None:
        if self._code is None:  # an exception that nobody caught: the interpreter has printed it
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # its reader is gone
                stream.flush()
        os._exit(self._code)


def failure_was_printed(error: BaseException) -> bool:
    """Wait until the monitor has printed the first failure of all ranks; False if it does not.

    Call it last before the process ends. Signals are ignored from here on: a launcher that ends the other
    ranks does not interrupt the wait.
    """
    page: StatusPage | None = getattr(error, "status_page", None)
    if page is None:
        return False
    with contextlib.suppress(ValueError):  # not on the main thread, which alone has handlers
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    was_printed = wait_until_printed(page)
    page.close()
    return was_printed


def wait_until_printed(page: StatusPage) -> bool:
    """Whether the monitor has printed this rank's failure, PRINT_WAIT_S from now at the latest."""
    wake(int(page.numbers[MONITOR]))
    deadline = time.monotonic() + PRINT_WAIT_S
    while not page.numbers[PRINTED] and time.monotonic() < deadline:
        monitor = int(page.numbers[MONITOR])  # 0: it has not started yet
        if monitor and not proc.is_alive(monitor):
            break
        time.sleep(0.02)
    return bool(page.numbers[PRINTED])


def wake(monitor: int) -> None:
    """Continue a monitor that was stopped (SIGSTOP): it would print nothing, and outlive its run."""
    if monitor:
        with contextlib.suppress(OSError):  # it has ended
            os.kill(monitor, signal.SIGCONT)
