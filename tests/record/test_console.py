"""The printed progress of a run: on terminals (a pty) of several widths, in pipes and logs."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp.record.recorder import LOG_COLUMNS, Console

ROOT = Path(__file__).parents[2]
ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def metrics(step: int = 1200, **changes: float) -> dict[str, float]:
    known: dict[str, float] = {
        "step": step, "loss": 2.34567, "grad_norm": 1.234, "lr": 1e-3, "samples": 64, "tokens": 16384,
        "step_time_s": 0.105, "data_wait_s": 0.0, "max_mem_gib": 61.2, "mfu": 0.41,
    }  # fmt: skip
    return known | changes


class Terminal:
    """A pty of so many columns, and what was drawn on it."""

    def __init__(self, columns: int) -> None:
        self.ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    @contextlib.contextmanager
    def stream(self) -> Iterator[io.TextIOBase]:
        with os.fdopen(os.dup(self.theirs), "w") as stream:
            yield stream

    def read(self) -> str:
        """Until its last writer is gone."""
        os.close(self.theirs)
        said = b""
        with contextlib.suppress(OSError):  # a pty without a writer ends so on Linux
            while chunk := os.read(self.ours, 1 << 16):
                said += chunk
        os.close(self.ours)
        return said.decode()


@pytest.mark.parametrize("columns", [20, 80])
def test_the_live_line_fits_its_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal(columns)
    with terminal.stream() as stream:
        console = Console(total_steps=5000, every=1, unit="tok", stream=stream)  # type: ignore[arg-type]
        console.step(metrics(), "saved 1000")
        Console.clear_live()
    seen = terminal.read().split("\r\x1b[2K")[-1].rstrip("\r\n")
    assert len(seen) < columns, "a full line wraps"
    assert seen.startswith("step 1200/5000")
    if columns == 80:
        for expected in ("24%", "loss 2.3457", "156k tok/s", "41% MFU", "61.2 GiB", "left"):
            assert expected in seen, seen


# ---------------------------------------------------------------- logs


def logged(steps: list[dict[str, float]], total: int = 100_000, every: int = 1) -> list[str]:
    out = io.StringIO()
    console = Console(total_steps=total, every=every, unit="tok", stream=out)
    for one in steps:
        console.step(one, "saved 1")
    return out.getvalue().splitlines()


def test_a_log_has_one_plain_line_a_record_in_columns_that_stand_still() -> None:
    times = [(1, 9.5), (10, 0.1), (100_000, 12.0)]
    lines = logged(
        [metrics(step, loss=loss, grad_norm=grad) for step, loss in times for grad in (0.01, 123.4)]
    )
    assert len(lines) == 6
    assert all(len(line) <= LOG_COLUMNS and not ESCAPE.search(line) for line in lines)
    assert len({line.index("tok/s") for line in lines[:4]}) == 1
    assert all("left" in line and "GiB" in line for line in lines)
    (padded,) = logged([metrics(epoch=0.5, padding=0.126, positions_per_s=312_000)])
    for expected in ("ep  0.50", "grad 1.23", "lr 1.0e-03", "156k/312k tok/s", "13% padding", "left"):
        assert expected in padded, padded


# ---------------------------------------------------------------- streams that fail


class Fails(io.StringIO):
    """As a log on a disk that is full while `full` is set."""

    full = False

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_lines_that_cannot_be_printed_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    out = Fails()
    console = Console(total_steps=9, every=1, unit="tok", stream=out)
    for step in range(1, 6):
        out.full = 2 <= step <= 4
        console.step(metrics(step), "")
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1/9", "5/9"]
    message = "the steps' lines cannot be printed (No space left on device): the run continues"
    assert caplog.messages == [message]


# ---------------------------------------------------------------- real runs


def command(run: Path) -> list[str]:
    words = f"--model.name mlp --train.steps 6 --checkpoint.every_steps 3 --run.dir {run}"
    return ["train.py", *words.split()]


@pytest.mark.long
def test_a_real_run_on_a_terminal_of_eighty_columns(tmp_path: Path) -> None:
    terminal = Terminal(80)
    environ = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, *command(tmp_path / "run")],
        cwd=ROOT,
        env=environ,
        stdout=terminal.theirs,
        stderr=subprocess.PIPE,
    ) as process:
        text = terminal.read()
    assert process.returncode == 0, text
    drawn = [line.rstrip("\r") for part in text.split("\r\x1b[2K") for line in part.split("\n")]
    live = [line for part in drawn if (line := ESCAPE.sub("", part)).startswith("step ")]
    assert live[-1].split()[:4] == ["step", "6/6", "100%", "loss"]
    assert all(len(line) < 80 for line in live)
    assert any(line.startswith("checkpoint of step 3 sealed") for line in drawn), "a line above the live one"
    assert set(ESCAPE.findall(text)) == {"\x1b[2K"}


def test_a_step_that_waits_for_its_data_says_so_in_the_line() -> None:
    little, some, all_of_it = logged([metrics(data_wait_s=waited) for waited in (0.005, 0.025, 0.105)])
    assert "data" not in little
    assert "data 24%" in some
    assert len(all_of_it) <= LOG_COLUMNS


def test_a_line_shows_means_of_the_steps_since_the_last_one() -> None:
    """A short last step of an epoch has a low rate of its own."""
    full = {"samples": 64, "tokens": 0, "step_time_s": 0.2, "mfu": 0.4}
    short = {**full, "samples": 18, "step_time_s": 0.18, "mfu": 0.1}
    steps = [metrics(step, **(full if step % 5 else short)) for step in range(1, 11)]
    lines = logged(steps, every=5)
    assert len(lines) == 2
    assert all(" 280 tok/s" in line and " 34% MFU" in line for line in lines)
