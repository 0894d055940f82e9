"""A thread of the rank that answers the monitor. Where it does not, somebody holds Python's lock, or the
process is stopped.

    look          the stacks of all threads and the newest collectives, as one JSON line
    dump          the same with all that PyTorch's flight recorder has
    leave CODE    end this process at once

Without the lock a signal (SIGNAL below) still makes faulthandler write the stacks, in C, into a file beside
the cells.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from fsdp.base.torch_private.distributed import flight_recorder_entries

SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
"""Nobody else's: the C library keeps the first real-time signals, schedulers send none."""
DEEPEST = 60
NEWEST = 30


class Responder:
    def __init__(self, where: Path) -> None:
        """`where` with .sock is asked, with .stacks is written when nobody can answer."""
        self._training = threading.get_ident()
        self._socket_path = where.with_suffix(".sock")
        self._stacks = where.with_suffix(".stacks").open("w+", encoding="utf-8")
        self._was_enabled = faulthandler.is_enabled()
        # a fault in C (an abort of gloo, a bad pointer) leaves its stacks there as well
        faulthandler.enable(file=self._stacks, all_threads=True)
        if SIGNAL is not None:
            faulthandler.register(SIGNAL, file=self._stacks, all_threads=True, chain=False)
        self._ear = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._ear.bind(str(self._socket_path))
        self._ear.listen(8)
        threading.Thread(target=self._serve, name="witness", daemon=True).start()

    def close(self) -> None:
        # some systems know it of connections alone; Linux wakes the thread with it
        with contextlib.suppress(OSError):
            self._ear.shutdown(socket.SHUT_RDWR)
        self._ear.close()
        if SIGNAL is not None:
            faulthandler.unregister(SIGNAL)
        if self._was_enabled:
            faulthandler.enable()
        else:
            faulthandler.disable()
        self._stacks.close()
        for suffix in (".sock", ".stacks"):
            self._socket_path.with_suffix(suffix).unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            try:
                one, _ = self._ear.accept()
            except OSError:
                return
            # the monitor may have given up waiting
            with one, contextlib.suppress(OSError):
                word = one.recv(64).decode()
                if word.startswith("leave"):
                    os._exit(int(word.split()[1]))
                one.sendall(json.dumps(self.testimony(all_calls=word.startswith("dump"))).encode() + b"\n")

    def testimony(self, *, all_calls: bool) -> dict[str, Any]:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = {}
        training: list[list[Any]] = []
        lasti = 0
        for ident, frame in sys._current_frames().items():
            if ident == self._training:
                training, lasti = _stack(frame), frame.f_lasti
            elif ident != threading.get_ident():
                stacks[f"{names.get(ident, 'unnamed')}"] = _stack(frame)
        return {"training": training, "lasti": lasti, "threads": stacks, "calls": calls(all_calls)}


def _stack(frame: FrameType | None) -> list[list[Any]]:
    """Innermost first: file, line, function."""
    found: list[list[Any]] = []
    while frame is not None and len(found) < DEEPEST:
        found.append([frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name])
        frame = frame.f_back
    return found


def calls(everything: bool) -> list[dict[str, Any]]:
    """PyTorch's flight recorder. Empty where this torch has none: it must not be what a verdict rests on."""
    found = flight_recorder_entries()
    return found if everything else found[-NEWEST:]
