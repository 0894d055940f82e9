"""Printed progress of rank 0: a live line on a terminal, a plain line per record elsewhere.

A log's lines have at most 80 columns at fixed positions, so that they can be compared; a live line shows as
many fields as its width holds, the most important first, and other lines are printed above it. A stream that
cannot be written (a log on a full disk, a closed pipe) loses lines; the run continues.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TextIO

from fsdp.base.text import PrintableFormatter, prepare_streams, print_line
from fsdp.dist.env import DistEnv

log = logging.getLogger(__name__)

LOG_COLUMNS = 80
IMPORTANCE = ("step", "loss", "rate", "left", "memory", "mfu", "percent", "saved", "epoch", "grad", "lr")
"""The most important field first."""
WAIT_SHOWN = 0.1
"""From this part of the time on, the wait for data is shown instead of memory: --data.workers reduces it."""
ERASE = "\r\x1b[2K"


def set_up_logging(env: DistEnv) -> None:
    """Rank 0 logs from INFO, other ranks from WARNING, with their rank as prefix."""
    prepare_streams()
    root = logging.getLogger("fsdp")
    for handler in list(root.handlers):
        root.removeHandler(handler)
    handler = _LiveHandler(sys.stderr)
    prefix = "" if env.is_main else f"[rank {env.rank}] "
    handler.setFormatter(PrintableFormatter(f"{prefix}%(message)s"))
    root.addHandler(handler)
    root.propagate = False
    root.setLevel(logging.INFO if env.is_main else logging.WARNING)


class _LiveHandler(logging.StreamHandler[TextIO]):
    """Prints a log line above the live line."""

    def emit(self, record: logging.LogRecord) -> None:
        with Console.above_live():
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Called by emit. A full disk loses the line: this stream itself cannot report it."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def print_last(text: str) -> None:
    """Print a run's summary. A full log does not make the run fail."""
    try:
        print_line(text, sys.stdout)
    except OSError as error:
        log.warning("the summary cannot be printed (%s)", error.strerror)


class Console:
    """Progress of one run: a plain line every `every` steps, or a live line at most ten times a second."""

    _live: Console | None = None

    def __init__(self, *, total_steps: int, every: int, unit: str, stream: TextIO | None = None) -> None:
        self._out = stream or sys.stdout
        self.terminal = self._out.isatty() and os.environ.get("TERM") != "dumb"
        self._total, self._every, self._unit = total_steps, every, unit
        self._shown = ""
        """The live line."""
        self._drawn_at = 0.0
        self._failed = False
        self._started: tuple[int, float] | None = None
        self._steps: list[Mapping[str, float]] = []
        """Since the last line. Their means are shown: the last step of an epoch may be a short one."""

    def prints(self, step: int) -> bool:
        """Whether this step is printed, so that its numbers must be fetched from the device."""
        return step % self._every == 0 or step == self._total

    def step(self, record: Mapping[str, float], checkpoint: str) -> None:
        step = int(record["step"])
        if self._started is None:
            self._started = (step - 1, time.monotonic() - record["step_time_s"])
        self._steps.append(record)
        if self.terminal and (time.monotonic() - self._drawn_at > 0.1 or step == self._total):
            # The last column stays free: a terminal wraps a full line, which could then not be overwritten.
            self._shown = fit(self._fields(step, record, checkpoint), self._columns() - 1)
            self._write(ERASE + self._shown)
            self._drawn_at, Console._live = time.monotonic(), self
        elif not self.terminal and self.prints(step):
            # a log has a separate line for each save
            self._write(fit(self._fields(step, record, ""), LOG_COLUMNS).rstrip() + "\n")
        else:
            return
        self._steps = []

    def _fields(self, step: int, record: Mapping[str, float], checkpoint: str) -> dict[str, str]:
        width, total = len(str(self._total)), max(1, self._total)
        duration = max(1e-9, sum(record["step_time_s"] for record in self._steps))
        rate = sum(record["tokens"] or record["samples"] for record in self._steps) / duration
        waited = sum(record["data_wait_s"] for record in self._steps) / duration
        mfu = sum(record.get("mfu", 0.0) * record["step_time_s"] for record in self._steps) / duration
        memory = f"{record['max_mem_gib']:>4.1f} GiB" if waited < WAIT_SHOWN else f"data {waited:>3.0%}"
        fields = {
            "step": f"step {step:>{width}}/{self._total}",
            "percent": f"{step * 100 // total:>3}%" if self.terminal else "",
            "loss": f"loss {record['loss']:<6.4f}",
            "epoch": f"ep {record['epoch']:>5.2f}" if "epoch" in record else "",
            "grad": f"grad {record['grad_norm']:<6.3g}",
            "lr": f"lr {record['lr']:.1e}",
            "rate": f"{_short(rate):>4} {self._unit}/s",
            "mfu": f"{mfu:>3.0%} MFU" if "mfu" in record else "",
            "memory": memory,
            "left": f"{self._left(step):>5} left",
            "saved": checkpoint,
        }
        return {name: text for name, text in fields.items() if text}

    def _left(self, step: int) -> str:
        assert self._started is not None
        first, since = self._started
        seconds = (time.monotonic() - since) / max(1, step - first) * (self._total - step)
        minutes, seconds = divmod(math.ceil(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        if hours >= 48:
            return f"{hours // 24}d {hours % 24:02}h"
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._out.fileno()).columns or LOG_COLUMNS
        except OSError:  # the terminal is gone: the write reports it
            return LOG_COLUMNS

    @classmethod
    def clear_live(cls) -> None:
        """End the live line: what follows is printed below it."""
        if cls._live is not None:
            live, cls._live = cls._live, None
            live._write("\n")

    @classmethod
    @contextlib.contextmanager
    def above_live(cls) -> Iterator[None]:
        """Around printing a line: it takes the live line's place, which is drawn again below it."""
        live = cls._live
        if live is not None:
            live._write(ERASE)
        yield
        if live is not None:
            live._write(live._shown)

    def print_line(self, text: str) -> None:
        with self.above_live():
            self._write(text + "\n")

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except OSError as error:
            if not self._failed:
                self._failed = True
                log.warning("the steps' lines cannot be printed (%s): the run continues", error.strerror)


def fit(fields: Mapping[str, str], columns: int) -> str:
    """As many fields as `columns` hold, in their fixed order: the least important ones are left out."""
    for count in range(len(IMPORTANCE), 0, -1):
        line = "  ".join(text for name, text in fields.items() if name in IMPORTANCE[:count])
        if len(line) <= columns:
            return line
    return fields[IMPORTANCE[0]][: max(0, columns)]


def _short(number: float) -> str:
    for limit, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if number >= limit:
            return f"{number / divisor:.3g}{unit}"
    return f"{number:.0f}"
