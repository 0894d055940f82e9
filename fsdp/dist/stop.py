"""Stopping in time: a signal, a file, a deadline or the launcher marks; the ranks agree on one step; the loop
acts.

The agreement is a sum of one number a rank, read after a step's update. On the host it travels with the
step's loss and costs no reduction of its own, which a small model on few processors would feel; where the
loss is on a device it goes by a gloo group, begun before the forward pass. A request that arrives while a
step runs is acted on after the next one, at the latest. An evaluation, where no step ends for long, asks
`check_now` between batches; what arrives while data are awaited or units compiled is marked, and seen at the
end of that step.

Exit codes: a run that stopped as asked, its checkpoint sealed, leaves with 0 (the loop leaves RUN/STOPPED
with the reason for scripts); a second Ctrl-C, a second or more after the first, leaves at once with 130 and
saves nothing.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp.base import proc
from fsdp.base.errors import LaunchError
from fsdp.base.phases import StopReason
from fsdp.config import StopSection
from fsdp.dist.collectives import Sum, call_behind
from fsdp.dist.env import DistEnv

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
REASONS = (
    *(StopReason[one.name] for one in SIGNALS),
    StopReason.STOP_FILE,
    StopReason.DEADLINE,
    StopReason.LAUNCHER,
)
"""What stops a run, as the ranks tell each other: by place here. SIGCONT comes with others and stops nothing.
"""
WISH, STEP, STEPS = 2, 2**18, 2**16
"""A rank's word is one number, of which the sum over ranks is read: 1 where it is due to save (only the first
rank says that), its wish to stop, and its step modulo STEPS. Exact up to 131,072 ranks. One number and not
eight: gloo cuts what it sums into two pieces a rank and sends each around the ring, 0.2 ms of a processor for
one number on 4 ranks, 0.9 ms for eleven.
"""

AGAIN_S = 1.0
"""torchrun sends its workers the Ctrl-C that the terminal has sent them already: only a later one is a second
wish.
"""
LOOK_S = 0.5
"""The stop file is looked at no oftener: on a shared folder each look is a question to a server."""
MARGIN_S = 1.0
LAST_ACTS: list[Callable[[], None]] = []
"""Called when a second Ctrl-C ends the process at once; on another thread, and nothing may wait."""


@dataclass(frozen=True)
class Agreed:
    """The same on every rank: why to stop (None: go on), and whether a save is due by the clock."""

    stop: StopReason | None
    save: bool


class Stopper:
    """Building, agreed and check_now are collective; begin and sum_with only start a reduction."""

    process_ends: ClassVar[bool] = False
    """Set by a program that ends with its run. After an exception signals then stay marked: a launcher sends
    SIGTERM to the other ranks when one has left, which would end this one before its atexit handlers.
    """

    def __init__(
        self,
        section: StopSection,
        env: DistEnv,
        run_dir: Path,
        reporter_reason: Callable[[], str | None],
        *,
        end_time: float | None = None,
        timeout_s: float = 600.0,
        every_minutes: float = 0.0,
        save_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._env, self._reporter_reason, self._save_seconds = env, reporter_reason, save_seconds
        self._file = Path(section.file) if section.file else run_dir / "STOP"
        self.on_host = env.device.type == "cpu"
        self._group = None
        if not self.on_host and env.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._ends = _ends(section.deadline_s, end_time)
        self._every_s, self._last_save = every_minutes * 60, time.monotonic()
        self._looked, self._file_seen = 0.0, False
        self._begun: Sum | None = None
        self._signature, self._sums = 0, [0.0, 0.0]
        self._wish: StopReason | None = None
        self._step, self._step_began, self._step_s = 0, 0.0, 0.0
        self._marks = _Marks()
        if env.is_main and self._file.exists():
            # Left by the stop before this start: the same command again means to go on.
            log.info("removed %s, which stopped the run before this one", self._file)
            self._file.unlink()

    def begin(self, step: int) -> None:
        """Before the forward pass, after its data have come. What is marked until the word is given, here or
        beside the loss, is agreed on behind this step.
        """
        now = time.monotonic()
        if self._step_began:
            self._step_s = max(now - self._step_began, 0.5 * self._step_s)
        self._step, self._step_began = step, now
        self._begun = None if self.on_host else Sum(self._numbers(self._signature, self._word()), self._group)

    def sum_with(
        self, loss: Tensor, behind: Tensor | None = None, signature: Callable[[], int] = lambda: 0
    ) -> Sum:
        """Sum a step's loss over the ranks, once a step: the first number of what comes is that sum. On a
        device it goes beside the backward, on the host behind that of `behind`. `signature` is called behind
        it, too (fsdp/watch/branch_check.py).
        """
        if not self.on_host:
            if behind is not None:
                call_behind(behind, lambda: self._sign(signature()))
            return Sum(loss.view(1))
        word = self._word()
        self._begun = Sum(lambda: torch.cat([loss.view(1), self._numbers(signature(), word)]), behind=behind)
        return self._begun

    def _sign(self, signature: int) -> None:
        self._signature = signature

    def signatures(self) -> list[float]:
        """Sums over the ranks of the newest signatures that all have sent, and of their squares: this step's
        on the host, the step's before it on a device, where they come with `agreed`.
        """
        return self._sums if self._begun is None else self._begun.wait()[-3:-1].tolist()

    def agreed(self) -> Agreed:
        """After the update: what all ranks have agreed on in this step."""
        assert self._begun is not None, "agreed() before sum_with()"
        begun, self._begun = self._begun, None
        *_, self._sums[0], self._sums[1], word = begun.wait().tolist()
        return self._outcome(word)

    def check_now(self) -> Agreed:
        """Ask all ranks at once, where no step ends for long: between the batches of an evaluation."""
        return self._outcome(Sum(self._numbers(0, self._word()), self._group).wait()[-1])

    def saved(self) -> None:
        """A save has begun for whatever reason: the clock of `every_minutes` starts anew."""
        self._last_save = time.monotonic()

    def close(self) -> None:
        """Restore the signal handlers of before."""
        self._marks.close(restore=not (self.process_ends and sys.exc_info()[0] is not None))
        if self._file_seen:
            self._file.unlink(missing_ok=True)

    @staticmethod
    def _numbers(signature: int, word: int) -> Tensor:
        """This rank's share of what is summed, in the dtype of a loss."""
        return torch.tensor([signature, signature * signature, word], dtype=torch.float64)

    def _word(self) -> int:
        """The step, whether this rank wishes to stop and whether a save is due, as one number."""
        self._wish = self._reason()
        due = self._env.is_main and self._every_s > 0 and time.monotonic() - self._last_save >= self._every_s
        return due + WISH * (self._wish is not None) + STEP * (self._step % STEPS)

    def _outcome(self, summed: Tensor | float) -> Agreed:
        steps, rest = divmod(int(summed), STEP)
        wishes, save = divmod(rest, WISH)
        if steps != self._env.world_size * (self._step % STEPS):
            raise LaunchError(
                f"rank {self._env.rank} is at step {self._step}, others are not: they do not train one run.",
                "start all ranks with the same --run.dir, on a folder that they share",
            )
        if save:
            self.saved()
        return Agreed(self._agreed_reason() if wishes else None, bool(save))

    def _agreed_reason(self) -> StopReason:
        """Which of the ranks' reasons is told matters to nobody, only that all tell the same. Collective,
        once in a run.
        """
        place = torch.tensor(REASONS.index(self._wish) if self._wish else -1)
        if self._env.world_size > 1:
            dist.all_reduce(place, dist.ReduceOp.MAX, group=self._group)
        return REASONS[int(place)]

    def _reason(self) -> StopReason | None:
        """This rank's own view."""
        if self._marks.first is not None:
            return StopReason[self._marks.first.name]
        if self._env.is_main and self._sees_file():
            return StopReason.STOP_FILE
        if self._too_late():
            return StopReason.DEADLINE
        asked = self._reporter_reason()
        if asked is not None:
            log.info("the launcher asks to stop: %s", asked)
            return StopReason.LAUNCHER
        return None

    def _sees_file(self) -> bool:
        now = time.monotonic()
        if not self._file_seen and now - self._looked >= LOOK_S:
            self._looked, self._file_seen = now, self._file.exists()
        return self._file_seen

    def _too_late(self) -> bool:
        """Would the end of the step after this one leave too little time for a save? It acts after this one."""
        if self._ends is None:
            return False
        needed = 1.5 * self._save_seconds() + 2 * self._step_s + MARGIN_S
        return time.monotonic() + needed >= self._ends


def _ends(deadline_s: float, end_time: float | None) -> float | None:
    """The earlier of the two on the monotonic clock. A deadline counts from the start of the process, imports
    and all.
    """
    ends = []
    if deadline_s:
        ends.append(time.monotonic() - proc.age_s() + deadline_s)
    if end_time is not None:
        ends.append(time.monotonic() + end_time - time.time())
    return min(ends, default=None)


class _Marks:
    """The signal handlers, which only mark, and a thread that hears a second Ctrl-C even while the main
    thread hangs in C.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._old: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            log.info("not on the main thread: signals are the launcher's to handle")
            return
        self._ear, self._mouth = os.pipe()
        os.set_blocking(self._mouth, False)
        for one in SIGNALS:
            self._old[one] = signal.signal(one, self._mark)
        self._old_fd = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()

    def _mark(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = signal.Signals(number)

    def _listen(self) -> None:
        """Python runs handlers between two bytecodes of the main thread; this thread needs no such moment."""
        interrupted = 0.0
        while heard := os.read(self._ear, 1):
            now = time.monotonic()
            if heard[0] != signal.SIGINT:
                continue
            if interrupted and now - interrupted >= AGAIN_S:
                for act in LAST_ACTS:
                    act()
                os.write(2, b"interrupted again: leaving at once, nothing is saved\n")
                os._exit(130)
            interrupted = interrupted or now

    def close(self, *, restore: bool = True) -> None:
        if not self._old:
            return
        signal.set_wakeup_fd(self._old_fd)
        for one, handler in self._old.items() if restore else ():
            signal.signal(one, handler if handler is not None else signal.SIG_DFL)
        self._old = {}
        os.close(self._mouth)
        self._thread.join()
        os.close(self._ear)
