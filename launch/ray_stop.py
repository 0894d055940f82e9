"""The driver's stop signals: they become the ranks' stop file, or end a driver whose ranks have not started.

When a process connects, Ray's core replaces the handler of SIGTERM by one that prints a trace and aborts. So
the signals are blocked, in every thread, from the driver's start until its handlers are installed after that;
a thread waits for them meanwhile.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from fsdp.base.errors import ShardrunError
from fsdp.base.phases import stop_signals
from fsdp.rundir import history
from fsdp.rundir.paths import RunDir, write_atomically
from launch.policy import EXIT_INTERRUPTED

POLL_S = 0.2
SECOND_SIGINT_S = 1.0


class StoppedEarly(ShardrunError):
    """A signal came before the ranks started."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        name = signal.Signals(number).name
        super().__init__(f"{name} before the ranks started: nothing was trained in this start.")


class Stopping:
    """A second Ctrl-C, a second or more after the first, ends the process at once."""

    run: RunDir | None = None
    """Whose STOPPED has the reason: a Slurm job is requeued after it."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._received_at = 0.0
        self._training = self._connected = False
        signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
        self._thread = threading.Thread(target=self._await, name="signals", daemon=True)
        self._thread.start()

    def _await(self) -> None:
        """End the process, which may import or wait in Ray's core for minutes."""
        while not self._connected:
            if (found := signal.sigtimedwait(stop_signals(), POLL_S)) is not None:
                error = self._early(found.si_signo)
                os.write(2, f"train.py: {error}\n".encode())
                os._exit(error.exit_code)

    def handle(self) -> None:
        """Call it when Ray has connected."""
        self._connected = True
        self._thread.join()
        for one in stop_signals():
            signal.signal(one, self._record)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())

    def _record(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._received_at = signal.Signals(number), now
            if not self._training:
                raise self._early(number)
        elif number == signal.SIGINT and now - self._received_at >= SECOND_SIGINT_S:
            os.write(2, b"train.py: interrupted again: the driver ends now, nothing is saved\n")
            os._exit(EXIT_INTERRUPTED)

    def _early(self, number: int) -> StoppedEarly:
        if self.run is not None:
            self.mark(self.run, signal.Signals(number).name, history.last_step(self.run))
        return StoppedEarly(number)

    @staticmethod
    def mark(run: RunDir, reason: str, step: int) -> None:
        write_atomically(run.stopped, f"{reason} at step {step}\n")

    def train(self, fit: Callable[[], Any], file: Path) -> Any:
        """The value of `fit`, called on a thread: on the main thread Ray would handle Ctrl-C."""
        values, errors = list[Any](), list[BaseException]()

        def call() -> None:
            try:
                values.append(fit())
            except BaseException as error:
                errors.append(error)

        self._training = True
        thread = threading.Thread(target=call, name="fit", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL_S)
            # Each start removes the previous one's stop file: create it again until the ranks have ended.
            if self.signal is not None and thread.is_alive() and not file.exists():
                file.touch()
        if self.signal is not None:
            file.unlink(missing_ok=True)
        if errors:
            raise errors[0]
        return values[0]
