"""Printed progress of rank 0: a live line on a terminal or in a notebook, a plain line per record in a log.

A log's lines have at most 80 columns at fixed positions, so that they can be compared; a live line shows as
many fields as its width holds, the most important first, and other lines are printed above it.
fsdp/record/metrics.py has the numbers. A stream that cannot be written (a log on a full disk, a closed pipe)
loses lines; the run continues.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from fsdp.base.streams import PrintableFormatter, prepare_streams, print_line
from fsdp.dist.env import DistEnv
from fsdp.record.metrics import StepMetrics

log = logging.getLogger(__name__)

LOG_COLUMNS = 80
NOTEBOOK_COLUMNS = 100
ORDER = ("step", "bar", "percent", "loss", "epoch", "grad", "lr", "rate", "mfu", "memory", "left", "saved")
LIVE = (
    "step", "loss", "rate", "percent", "left", "memory", "mfu", "bar", "saved", "epoch", "grad", "lr",
)  # fmt: skip
IN_A_LOG = ("step", "loss", "rate", "left", "memory", "mfu", "epoch", "grad", "lr")
"""The most important field first. A log has a separate line for each save."""
WAIT_SHOWN = 0.1
"""From this part of the time on, the wait for data is shown instead of memory: --data.workers reduces it."""
BAR = 8
"""Columns of the bar: it fits into 80 columns beside the fields before it."""
BOLD, GREEN, PLAIN = "\x1b[1m", "\x1b[32m", "\x1b[0m"
COLOURS = {"loss": BOLD, "bar": GREEN}
ERASE = "\r\x1b[2K"


def set_up_logging(env: DistEnv) -> None:
    """Rank 0 logs from INFO, other ranks from WARNING, with their rank as prefix."""
    prepare_streams()
    root = logging.getLogger("fsdp")
    for handler in list(root.handlers):
        root.removeHandler(handler)
    handler = _LiveHandler(sys.stderr)
    handler.setFormatter(
        PrintableFormatter("%(message)s" if env.is_main else f"[rank {env.rank}] %(message)s")
    )
    root.addHandler(handler)
    root.propagate = False
    root.setLevel(logging.INFO if env.is_main else logging.WARNING)


class _LiveHandler(logging.StreamHandler[TextIO]):
    """A stream handler that prints a log line above the live line."""

    _failed = 0
    """Consecutive records that could not be written."""

    def emit(self, record: logging.LogRecord) -> None:
        before = self._failed
        with Console.above_live():
            super().emit(record)
        if before and self._failed == before:
            self._failed = 0
            log.warning("this log can be written again: %d lines came late or are lost", before)

    def handleError(self, record: logging.LogRecord) -> None:
        """Called by emit. A full disk is counted, since this stream itself cannot report it."""
        if isinstance(sys.exc_info()[1], OSError):
            self._failed += 1
        else:
            super().handleError(record)


def print_last(text: str) -> None:
    """Print a run's summary. A full log does not make the run fail."""
    try:
        print_line(_encodable(text, sys.stdout), sys.stdout)
    except OSError as error:
        log.warning("the summary cannot be printed (%s)", error.strerror)


def _encodable(text: str, stream: TextIO) -> str:
    """With escapes for what the stream's encoding lacks, such as bytes of a file's name that are no UTF-8."""
    encoding = getattr(stream, "encoding", None) or "utf-8"  # an io.StringIO has none
    return text.encode(encoding, "backslashreplace").decode(encoding)


@dataclass
class _Interval:
    """The steps since the last line. Their means are shown: the last step of an epoch may be a short one."""

    amount: int = 0
    step_s: float = 1e-9
    """Never 0: the others are divided by it."""
    waited_s: float = 0.0
    mfu_s: float = 0.0
    """The sum of MFU times seconds."""

    def add(self, m: StepMetrics) -> None:
        self.amount += m.tokens or m.samples
        self.step_s += m.step_time_s
        self.waited_s += m.data_wait_s
        self.mfu_s += m.extra.get("mfu", 0.0) * m.step_time_s

    @property
    def rate(self) -> float:
        return self.amount / self.step_s

    @property
    def waited(self) -> float:
        return self.waited_s / self.step_s

    @property
    def mfu(self) -> float:
        return self.mfu_s / self.step_s


class Console:
    """Progress of one run: a plain line every `every` steps, or a live line at most ten times a second."""

    _live: Console | None = None

    def __init__(self, *, total_steps: int, every: int, unit: str, stream: TextIO | None = None) -> None:
        self._out = stream or sys.stdout
        self.terminal = self._out.isatty() and os.environ.get("TERM") != "dumb"
        self._notebook = not self.terminal and is_notebook(self._out)
        self._colours = self.terminal and not os.environ.get("NO_COLOR")
        self._shown = ""
        """The live line."""
        self._total, self._every, self._unit = total_steps, every, unit
        self._drawn_at = 0.0
        self._failed = 0
        """Consecutive lines that could not be written."""
        self._started: tuple[int, float] | None = None
        self._since_line = _Interval()

    def prints(self, step: int) -> bool:
        """Whether this step is printed, so that its numbers must be fetched from the device."""
        return step % self._every == 0 or step == self._total

    def step(self, m: StepMetrics, checkpoint: str) -> None:
        if self._started is None:
            self._started = (m.step - 1, time.monotonic() - m.step_time_s)
        self._since_line.add(m)
        live = self.terminal or self._notebook
        if not (self._draws(m.step) if live else self.prints(m.step)):
            return
        if live:
            self._draw(self._fields(m, checkpoint))
        else:
            self._write(fit(self._fields(m, ""), IN_A_LOG, LOG_COLUMNS).rstrip() + "\n")
        self._since_line = _Interval()

    def _draws(self, step: int) -> bool:
        return time.monotonic() - self._drawn_at > 0.1 or step == self._total

    def _fields(self, m: StepMetrics, checkpoint: str) -> dict[str, str]:
        width = len(str(self._total))
        steps = self._since_line
        memory, wait = f"{m.max_mem_gib:>4.1f} GiB", f"data {steps.waited:>3.0%}"
        fields = {
            "step": f"step {m.step:>{width}}/{self._total}",
            "bar": bar(m.step / max(1, self._total), self._out.encoding),
            "percent": f"{m.step * 100 // max(1, self._total):>3}%",
            "loss": f"loss {m.loss:<6.4f}",
            "grad": f"grad {m.grad_norm:<6.3g}",
            "lr": f"lr {m.lr:.1e}",
            "rate": f"{_short(steps.rate):>4} {self._unit}/s",
            "memory": memory if steps.waited < WAIT_SHOWN else wait,
            "left": f"{self._left(m.step):>5} left",
        }
        if m.epoch is not None:
            fields["epoch"] = f"ep {m.epoch:>5.2f}"
        if "mfu" in m.extra:
            fields["mfu"] = f"{steps.mfu:>3.0%} MFU"
        if checkpoint:
            fields["saved"] = checkpoint
        return fields

    def _left(self, step: int) -> str:
        assert self._started is not None
        first, since = self._started
        seconds = (time.monotonic() - since) / max(1, step - first) * (self._total - step)
        minutes, seconds = divmod(math.ceil(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        days, hours_of_day = divmod(hours, 24)
        if days >= 2:
            return f"{days}d {hours_of_day:02}h"
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

    def _columns(self) -> int:
        if self._notebook:
            return NOTEBOOK_COLUMNS
        try:
            return os.get_terminal_size(self._out.fileno()).columns or LOG_COLUMNS
        except OSError:  # the terminal is gone: the write reports it
            return LOG_COLUMNS

    def _draw(self, fields: Mapping[str, str]) -> None:
        # The last column stays free: a terminal wraps a full line, which could then not be overwritten.
        line = fit(fields, LIVE, self._columns() - 1, COLOURS if self._colours else {})
        self._write(self._erasing() + line)
        self._shown, self._drawn_at = line, time.monotonic()
        Console._live = self

    def _erasing(self) -> str:
        """A notebook has no erasing: spaces cover the line."""
        return ERASE if self.terminal else "\r" + " " * len(self._shown) + "\r"

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
            live._write(live._erasing())
        yield
        if live is not None:
            live._write(live._shown)

    def print_line(self, text: str) -> None:
        with self.above_live():
            self._write(text + "\n")

    def _write(self, text: str) -> None:
        try:
            self._out.write(_encodable(text, self._out))
            self._out.flush()
        except OSError as error:
            self._failed += 1
            if self._failed == 1:
                log.warning("the steps' lines cannot be printed (%s): the run continues", error.strerror)
            return
        if self._failed:
            failed, self._failed = self._failed, 0
            log.warning("the steps' lines are printed again: %d came late or are lost", failed)


def is_notebook(stream: TextIO) -> bool:
    """Whether the stream is ipykernel's, shown in a notebook's cell."""
    return type(stream).__module__.partition(".")[0] == "ipykernel"


def bar(share: float, encoding: str | None) -> str:
    """A bar of BAR columns; `#` and `-` where the stream has no blocks."""
    full = min(BAR, max(0, int(share * BAR)))
    done, left = ("█", "░") if "utf" in (encoding or "").lower() else ("#", "-")
    return done * full + left * (BAR - full)


def start_facts(facts: Mapping[str, str], stream: TextIO | None = None) -> Mapping[str, str]:
    """On a terminal the facts as one text, a fact a line and aligned; in a log as they are."""
    stream = stream or sys.stderr
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return facts
    width = max(map(len, facts)) + 2
    columns = max(width + 20, shutil.get_terminal_size().columns - 1)
    lines = [
        textwrap.fill(text, columns, initial_indent=f" {name:<{width}}", subsequent_indent=" " * (width + 1))
        for name, text in facts.items()
    ]
    return {"": "\n".join(lines).removeprefix(" ")}


def fit(
    fields: Mapping[str, str],
    importance: Sequence[str],
    columns: int,
    colours: Mapping[str, str] | None = None,
) -> str:
    """As many fields as `columns` hold, in their fixed order. Gaps shrink before a less important field is
    left out.
    """
    kept = [name for name in importance if name in fields]
    while kept:
        chosen = [name for name in ORDER if name in kept]
        roomy, close = (len(gap.join(fields[name] for name in chosen)) <= columns for gap in ("  ", " "))
        # The gaps do not shrink for the two least important fields.
        if roomy or (close and kept[-1] not in ("grad", "lr")):
            gap = "  " if roomy else " "
            return gap.join(_painted(fields[name], (colours or {}).get(name)) for name in chosen)
        kept.pop()
    return next(iter(fields.values()), "")[: max(0, columns)]


def _painted(text: str, colour: str | None) -> str:
    return f"{colour}{text}{PLAIN}" if colour else text


def _short(number: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{number:.0f}"
