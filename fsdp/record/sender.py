"""Sends records to a server from a thread of its own: one that is slow or away does not slow the steps.

While a call lasts, up to MOST_WAITING records wait, and the next call sends them together. Later ones are
lost; the log says so when that begins and when it ends.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

log = logging.getLogger(__name__)

TimedRecord = tuple[int, Mapping[str, float], float]
"""Step, values, and when they were recorded."""

MOST_WAITING = 10_000
TOGETHER = 64
CLOSE_S = 20.0
"""How long the end of a run waits for the server."""
_stuck = threading.Event()


def any_stuck() -> bool:
    """Whether a server has not taken its last records in CLOSE_S: its library may wait again at exit."""
    return _stuck.is_set()


class Losses:
    """Consecutive lost records of one sink, which the log names by `label`. The run continues."""

    def __init__(self, label: str) -> None:
        self._label, self._count = label, 0

    def add(self, step: int, why: object, count: int = 1) -> None:
        if not self._count:
            log.warning("step %d: %s cannot write: %s. The run continues", step, self._label, why)
        self._count += count

    def end(self, step: int) -> None:
        if self._count:
            log.warning("step %d: %s writes again, %d records are lost", step, self._label, self._count)
        self._count = 0

    def not_closed(self, error: Exception) -> None:
        log.warning("%s cannot be closed: %s. %d records are lost", self._label, error, self._count)

    def not_closed_yet(self) -> None:
        log.warning("%s is still closing; the run waits for it at its end", self._label)


class Sender:
    """`send` receives the entries that have come since its last call, `finish` comes last; on the thread."""

    def __init__(
        self, label: str, send: Callable[[Sequence[TimedRecord]], None], finish: Callable[[], None]
    ) -> None:
        self._send, self._finish, self._label = send, finish, label
        self._losses = Losses(label)
        self._waiting: queue.SimpleQueue[TimedRecord | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=label, daemon=True)
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put((step, values, time.time()))
        else:
            self._losses.add(step, f"{MOST_WAITING:,} records wait for it")

    def close(self) -> None:
        """Waits CLOSE_S at most. In a process that lives on the thread still sends what is left."""
        self._waiting.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _stuck.set()
            log.warning(
                "%s has not taken its last records %g s after the last step: they may be lost",
                self._label,
                CLOSE_S,
            )

    def _serve(self) -> None:
        ends = False
        while not ends:
            entries = [self._waiting.get()]
            while len(entries) < TOGETHER and not self._waiting.empty():
                entries.append(self._waiting.get())
            sent = [one for one in entries if one is not None]
            ends = len(sent) < len(entries)
            if sent:
                self._send_logged(sent)
        try:
            self._finish()
        except Exception as error:
            self._losses.not_closed(error)

    def _send_logged(self, entries: Sequence[TimedRecord]) -> None:
        step = entries[-1][0]
        try:
            self._send(entries)
        except Exception as error:  # the server is away, or refuses a value
            self._losses.add(step, error, len(entries))
        else:
            self._losses.end(step)
