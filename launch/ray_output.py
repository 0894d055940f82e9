"""The output of the ranks on the driver's terminal: a file per rank in RUN/logs, followed by a thread.

Ray's own forwarding (every worker's lines, prefixed, sometimes twice) is switched off. All nodes share the
run directory.
"""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import TextIO

from fsdp.base.streams import PrintableFormatter

POLL_S = 0.1


def redirect_output(folder: Path, rank: int, attempt: str) -> None:
    """Redirect Python's stdout, stderr and logging of this process to files, line by line."""
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout = _lines(folder / f"rank-{rank}.{attempt}.out")
    sys.stderr = _lines(folder / f"rank-{rank}.{attempt}.err")
    # Ray's errors reach the driver as an exception
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    logging.lastResort = logging.StreamHandler(sys.stderr)
    logging.lastResort.setFormatter(PrintableFormatter())
    logging.lastResort.setLevel(logging.WARNING)


def _lines(path: Path) -> TextIO:
    return path.open("a", buffering=1, encoding="utf-8")


class Follower:
    """Copies new whole lines of the folder's files to this process's stdout and stderr, until `close`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._read = folder, dict[Path, int]()
        self._live = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Print all that has been written by now, and stop."""
        self._over.set()
        self._thread.join()
        self._print_new(to_the_end=True)
        if self._live:
            print(flush=True)

    def _follow(self) -> None:
        while not self._over.wait(POLL_S):
            self._print_new()

    def _print_new(self, to_the_end: bool = False) -> None:
        # .err before .out: the log of a start precedes its first step
        for ending, stream in ((".err", sys.stderr), (".out", sys.stdout)):
            for path in sorted(self._folder.glob(f"*{ending}")):
                text = self._new_text(path, to_the_end)
                if text:
                    self._show(text, stream)

    def _show(self, text: str, stream: TextIO) -> None:
        """Print the text; on a terminal a progress line replaces the previous one."""
        if not sys.stdout.isatty():
            stream.write(text)
            stream.flush()
            return
        for line in text.splitlines():
            live = line.startswith("step ")
            start = "\r\x1b[2K" if live else "\n" * self._live
            stream.write(start + line + "\n" * (not live))
            self._live = live
        stream.flush()

    def _new_text(self, path: Path, to_the_end: bool) -> str:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            data = file.read()
        if not to_the_end:
            data = data[: data.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(data)
        return data.decode("utf-8", errors="replace")
