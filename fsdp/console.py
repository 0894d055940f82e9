"""What a person sees: one live line on a terminal, one plain line a record in a log. Rank 0 speaks.

Lines stay within 80 columns; columns are fixed, so that a log can be read down. What the numbers are is fsdp/metrics.py's.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TextIO

from fsdp.env import DistEnv
from fsdp.metrics import StepMetrics


def set_up_logging(env: DistEnv, stream: TextIO | None = None) -> None:
    """Rank 0 says what happens; others only what goes wrong, with their rank in front."""
    root = logging.getLogger("fsdp")
    for handler in list(root.handlers):
        root.removeHandler(handler)
    handler = _LiveHandler(stream or sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s" if env.is_main else f"[rank {env.rank}] %(message)s"))
    root.addHandler(handler)
    root.propagate = False
    root.setLevel(logging.INFO if env.is_main else logging.WARNING)


class _LiveHandler(logging.StreamHandler[TextIO]):
    """A log line never lands in the middle of the live line."""

    def emit(self, record: logging.LogRecord) -> None:
        Console.clear_live()
        super().emit(record)


class Console:
    """The progress of one run. `every` plain lines come at fixed steps; a terminal is drawn at most ten times a second."""

    _live: Console | None = None

    def __init__(self, *, total_steps: int, every: int, unit: str, stream: TextIO | None = None) -> None:
        self._out = stream or sys.stdout
        self._terminal = self._out.isatty() and os.environ.get("TERM") != "dumb"
        self._total, self._every, self._unit = total_steps, every, unit
        self._drawn_at = 0.0
        self._started: tuple[int, float] | None = None

    def wants(self, step: int) -> bool:
        """Whether this step's numbers will be looked at: they must then be fetched from the device."""
        return step % self._every == 0 or step == self._total

    def step(self, m: StepMetrics, checkpoint: str) -> None:
        if self._started is None:
            self._started = (m.step - 1, time.monotonic() - m.step_time_s)
        if self._terminal:
            if time.monotonic() - self._drawn_at > 0.1 or m.step == self._total:
                self._draw(self.line(m, checkpoint))
        elif self.wants(m.step):
            print(self.line(m, checkpoint), file=self._out, flush=True)

    def line(self, m: StepMetrics, checkpoint: str) -> str:
        width = len(str(self._total))
        rate = (m.tokens or m.samples) / max(m.step_time_s, 1e-9)
        parts = [
            f"step {m.step:>{width}}/{self._total}",
            f"loss {m.loss:<7.4f}",
            f"grad {m.grad_norm:<6.3g}",
            f"lr {m.lr:.1e}",
            f"{_short(rate):>5} {self._unit}/s",
            f"{m.max_mem_gib:.1f} GiB",
            f"{self._left(m.step)} left",
        ]
        text = "  ".join(parts)
        return f"{text}  {checkpoint}" if checkpoint and len(text) + len(checkpoint) < 78 else text

    def _left(self, step: int) -> str:
        assert self._started is not None
        first, since = self._started
        seconds = (time.monotonic() - since) / max(1, step - first) * (self._total - step)
        minutes, seconds = divmod(int(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

    def _draw(self, text: str) -> None:
        columns = os.get_terminal_size(self._out.fileno()).columns
        self._out.write("\r\x1b[2K" + text[: max(20, columns - 1)])
        self._out.flush()
        self._drawn_at = time.monotonic()
        Console._live = self

    @classmethod
    def clear_live(cls) -> None:
        if cls._live is not None:
            cls._live._out.write("\n")
            cls._live._out.flush()
            cls._live = None

    def say(self, text: str) -> None:
        self.clear_live()
        print(text, file=self._out, flush=True)


def _short(number: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{number:.0f}"
