"""Stop requests: a signal, a file, a deadline or the launcher; all ranks stop at the same step.

A request is only recorded where it arrives. The ranks then agree by an int64 sum over gloo, on the default
group: it starts before the forward pass and is read after the step's update, so that a request that arrives
during a step takes effect after the next step at the latest. An evaluation, in which no step ends for long,
calls `check_now` between batches. A request that arrives while the loop waits for data or compiles takes
effect at the end of that step.

Exit codes: 0 for a run that stopped on request and sealed its checkpoint (RUN/STOPPED has the reason); 130
for a second Ctrl-C, a second or more after the first, which ends the process at once and saves nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fsdp.base import proc
from fsdp.base.errors import LaunchError
from fsdp.base.phases import SIGNALS, Activity, StopReason, announces, stop_signals
from fsdp.config import StopSection
from fsdp.distributed.collectives import Sum
from fsdp.distributed.env import DistEnv

log = logging.getLogger(__name__)

REASONS = (
    *(StopReason[one.name] for one in SIGNALS),
    StopReason.STOP_FILE,
    StopReason.DEADLINE,
    StopReason.LAUNCHER,
)
"""The reasons to stop a run: ranks exchange how many have each, and the first here is the run's."""
SECOND_SIGINT_S = 1.0
"""torchrun repeats the terminal's Ctrl-C to its workers: only a SIGINT this much later is a second request.
"""
FILE_CHECK_S = 0.5
"""The least time between two checks for the stop file: on a shared folder each is a request to a server."""
MARGIN_S = 1.0
LAST_ACTS: list[Callable[[], None]] = []
"""Called when a second Ctrl-C ends the process at once; on another thread, and they must not block."""


@dataclass(frozen=True)
class StopDecision:
    """Equal on every rank: the reason to stop (None: continue), and whether a save is due by the clock."""

    stop: StopReason | None
    save: bool


class Stopper:
    """The stop requests of one run. The constructor, `agreed` and `check_now` are collective; `begin` starts
    a reduction without waiting for it.

    `process_ends`: after an exception too. The signal handlers then stay installed: a launcher sends SIGTERM
    to all ranks when one has ended, which would skip this one's atexit handlers.
    """

    def __init__(
        self,
        section: StopSection,
        env: DistEnv,
        run_dir: Path,
        reporter_reason: Callable[[], str | None] | None,
        *,
        end_time: float | None = None,
        every_minutes: float = 0.0,
        save_seconds: Callable[[], float] = lambda: 0.0,
        process_ends: bool = False,
    ) -> None:
        self._process_ends, self._main = process_ends, env.is_main
        self._env, self._reporter_reason, self._save_seconds = env, reporter_reason, save_seconds
        self._file = run_dir / "STOP"
        self._ends = _ends(section.deadline_s, end_time)
        self._every_s, self._last_save = every_minutes * 60, time.monotonic()
        self._checked, self._file_seen = 0.0, False
        self._pending: Sum | None = None
        self.signatures = [0, 0]
        """Sums over the ranks of the signatures that the last `agreed` received, and of their squares."""
        self._step, self._step_began, self._step_s = 0, 0.0, 0.0
        if env.is_main and self._sees_file():
            # From the stop before this start: the same command again continues the run.
            log.info("removing %s, which stopped the run before this one", self._file)
            self._remove_file()
        self._signals = _SignalRecorder()

    def begin(self, step: int, signature: int = 0) -> None:
        """Call before the forward pass, when its data are there. `signature` (fsdp/watch/replica_checks.py)
        is that of the previous step.

        Requests that arrived before are decided after this step.
        """
        now = time.monotonic()
        if self._step_began:
            self._step_s = max(now - self._step_began, 0.5 * self._step_s)
        self._step, self._step_began = step, now
        self._pending = self._vote(signature)

    def agreed(self) -> StopDecision:
        """The decision of this step, after its update."""
        assert self._pending is not None, "agreed() before begin()"
        pending, self._pending = self._pending, None
        decision, *self.signatures = self._decision(pending)
        return decision

    def check_now(self) -> StopDecision:
        """Decide now, between the batches of an evaluation, in which no step ends for long."""
        return self._decision(self._vote(0))[0]

    def saved(self) -> None:
        """Restart the clock of `every_minutes`: a save has begun."""
        self._last_save = time.monotonic()

    def close(self) -> None:
        """Restore the previous signal handlers."""
        self._signals.close(restore=not (self._process_ends and sys.exc_info()[0] is not None))
        if self._file_seen:
            self._remove_file()

    def _vote(self, signature: int) -> Sum:
        """Starts the sum of this rank's numbers: step, save due, signature and its square, each reason."""
        reason = self._reason()
        due = self._main and self._every_s > 0 and time.monotonic() - self._last_save >= self._every_s
        asked = [0] * len(REASONS)
        if reason is not None:
            asked[REASONS.index(reason)] = 1
        return Sum(torch.tensor([self._step, int(due), signature, signature**2, *asked], dtype=torch.int64))

    def _decision(self, vote: Sum) -> tuple[StopDecision, int, int]:
        """The decision, and the sums of the signatures and of their squares."""
        steps, save, signatures, squares, *asked = vote.wait().tolist()
        if steps != self._env.world_size * self._step:
            raise LaunchError(
                f"rank {self._env.rank} is at step {self._step}, others are not: they train different runs.",
                "start all ranks with the same --run.dir, on a folder that they share",
            )
        if save:
            self.saved()
        reason = REASONS[[*map(bool, asked)].index(True)] if any(asked) else None
        return StopDecision(reason, bool(save)), signatures, squares

    def _reason(self) -> StopReason | None:
        """This rank's own reason to stop."""
        if self._signals.first is not None:
            return StopReason[self._signals.first.name]
        now = time.monotonic()
        looks = self._main and now - self._checked >= FILE_CHECK_S
        if self._file_seen or (looks and self._sees_file()):
            return StopReason.STOP_FILE
        # whether the end of the next step would leave too little time for a save
        if self._ends is not None and (
            now + 1.5 * self._save_seconds() + 2 * self._step_s + MARGIN_S >= self._ends
        ):
            return StopReason.DEADLINE
        if self._reporter_reason is not None and (asked := self._reporter_reason()) is not None:
            log.info("the launcher requests a stop: %s", asked)
            return StopReason.LAUNCHER
        return None

    @announces(Activity.STORAGE)
    def _sees_file(self) -> bool:
        """Whether the file is there. On a storage that fails a later check may see it."""
        self._checked = time.monotonic()
        with contextlib.suppress(OSError):
            self._file.stat()
            self._file_seen = True
        return self._file_seen

    def _remove_file(self) -> None:
        """One line with the command if it cannot be removed: the folder may leave that to its owner."""
        try:
            self._file.unlink(missing_ok=True)
            self._file_seen = False
        except OSError as error:
            message = "%s, which stops the run, cannot be removed (%s). HINT: rm %s, as its owner"
            log.warning(message, self._file, error.strerror, shlex.quote(str(self._file)))


def _ends(deadline_s: float, end_time: float | None) -> float | None:
    """The earlier of the two, on the monotonic clock. A deadline counts from the start of the process."""
    ends = []
    if deadline_s:
        ends.append(time.monotonic() - proc.age_s() + deadline_s)
    if end_time is not None:
        ends.append(time.monotonic() + end_time - time.time())
    return min(ends, default=None)


class _SignalRecorder:
    """The signal handlers, which only record, and a thread that acts on a second Ctrl-C even while the main
    thread hangs in C.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._old: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            log.info("not on the main thread: the launcher handles signals")
            return
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        for one in stop_signals():
            self._old[one] = signal.signal(one, self._record)
        self._old_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = signal.Signals(number)

    def _listen(self) -> None:
        """Read the wakeup file descriptor: Python runs handlers only between bytecodes of the main thread."""
        interrupted = 0.0
        while number := os.read(self._read_end, 1):
            now = time.monotonic()
            if number[0] != signal.SIGINT:
                continue
            if interrupted and now - interrupted >= SECOND_SIGINT_S:
                for act in LAST_ACTS:
                    act()
                os.write(2, b"interrupted again: the process ends now, nothing is saved\n")
                os._exit(130)
            interrupted = interrupted or now

    def close(self, *, restore: bool = True) -> None:
        if not self._old:
            return
        signal.set_wakeup_fd(self._old_fd)
        for one, handler in self._old.items() if restore else ():
            signal.signal(one, handler if handler is not None else signal.SIG_DFL)
        self._old = {}
        os.close(self._write_end)
        self._thread.join()
        os.close(self._read_end)
