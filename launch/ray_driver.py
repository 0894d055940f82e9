"""The driver's terminal: stop signals become the ranks' stop file, and the ranks' output is printed.

When a process connects, Ray's core replaces the handler of SIGTERM by one that prints a trace and aborts. So
the signals are blocked, in every thread, from the driver's start until its handlers are installed after that;
a thread waits for them meanwhile, and ends a driver whose ranks have not started.

Each rank writes files of its own in RUN/logs, which a thread follows: Ray's own forwarding (every worker's
lines, prefixed, sometimes twice) is switched off. All nodes share the run directory.
"""

from __future__ import annotations

import os
import signal
import sys
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

POLL_S, FOLLOW_S = 0.2, 0.1
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
            if (received := signal.sigtimedwait(stop_signals(), POLL_S)) is not None:
                error = self._early(received.si_signo)
                os.write(2, f"train.py: {error}\n".encode())
                os._exit(error.exit_code)

    def handle(self) -> None:
        """Call it when Ray has connected."""
        self._connected = True
        self._thread.join()
        for number in stop_signals():
            signal.signal(number, self._record)
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


class Follower:
    """Copies new whole lines of the folder's files to this process's stdout and stderr, until `close`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._read = folder, dict[Path, int]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Print all that has been written by now, and stop."""
        self._over.set()
        self._thread.join()
        self._print_new(to_the_end=True)

    def _follow(self) -> None:
        while not self._over.wait(FOLLOW_S):
            self._print_new()

    def _print_new(self, to_the_end: bool = False) -> None:
        # .err before .out: the log of a start precedes its first step
        for ending, stream in ((".err", sys.stderr), (".out", sys.stdout)):
            for path in sorted(self._folder.glob(f"*{ending}")):
                if text := self._new_text(path, to_the_end):
                    print(text, end="", file=stream, flush=True)

    def _new_text(self, path: Path, to_the_end: bool) -> str:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            data = file.read()
        if not to_the_end:
            data = data[: data.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(data)
        return data.decode("utf-8", errors="replace")
