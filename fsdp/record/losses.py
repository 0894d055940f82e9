"""Records that a sink has lost: logged when that begins and when it ends. The run continues."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class Losses:
    """Consecutive lost records of one sink, which the log names by `label`."""

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
