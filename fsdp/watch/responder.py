"""Responder: a thread in the rank that answers the monitor's requests over a Unix socket.

    stacks       the stacks of all threads and each group's unfinished collective, as one JSON line
    dump         the same with everything that PyTorch's flight recorder holds
    exit CODE    end this process at once

It cannot answer while other code holds Python's lock, or while the process is stopped. Without the lock a
signal (STACK_SIGNAL) still makes faulthandler write the stacks, in C, into a file beside the status page.
"""

from __future__ import annotations

import contextlib
import dis
import faulthandler
import json
import os
import socket
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fsdp.base.devices import set_thread_device
from fsdp.base.torch_private.core import flight_recorder_entries
from fsdp.watch.observation import UNNAMED, group_calls
from fsdp.watch.status_page import STACK_SIGNAL

DEEPEST = 60


class Responder:
    def __init__(self, page: Path, device: torch.device) -> None:
        """The socket is beside the status page, with the suffix .sock; faulthandler writes into .stacks.
        Raises OSError if they cannot be made, as where the path is too long for a socket.
        """
        self._device = device
        self._training = threading.get_ident()
        self._socket_path = page.with_suffix(".sock")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(str(self._socket_path))
            self._listener.listen(8)
            self._stacks = page.with_suffix(".stacks").open("w+", encoding="utf-8")
        except OSError:
            self._listener.close()
            self._socket_path.unlink(missing_ok=True)
            raise
        self._was_enabled = faulthandler.is_enabled()
        # a fault in C (an abort of gloo, a bad pointer) writes its stacks there as well
        faulthandler.enable(file=self._stacks, all_threads=True)
        faulthandler.register(STACK_SIGNAL, file=self._stacks, all_threads=True, chain=False)
        threading.Thread(target=self._serve, name="responder", daemon=True).start()

    def close(self) -> None:
        # Linux wakes the thread with it; some systems allow it for connections alone
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        faulthandler.unregister(STACK_SIGNAL)
        faulthandler.disable()
        if self._was_enabled:
            # a program may have put something without a descriptor in the place of its standard error
            with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
                faulthandler.enable()
        self._stacks.close()
        for suffix in (".sock", ".stacks"):
            self._socket_path.with_suffix(suffix).unlink(missing_ok=True)

    def _serve(self) -> None:
        set_thread_device(self._device)  # NCCL's recorder asks events whether they have passed
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            # the monitor may have stopped waiting
            with connection, contextlib.suppress(OSError):
                command, _, code = connection.recv(64).decode().partition(" ")
                if command == "exit":
                    os._exit(int(code))
                connection.sendall(json.dumps(self.snapshot(all_calls=command == "dump")).encode() + b"\n")

    def snapshot(self, *, all_calls: bool) -> dict[str, Any]:
        """Stacks of all threads but this one, and the collectives in the flight recorder."""
        names = {thread.ident: thread.name for thread in threading.enumerate() if not _is_dummy(thread)}
        recorded, groups = _recorded()
        stacks = {}
        training: list[list[Any]] = []
        lasti, in_python = 0, False
        for ident, frame in sys._current_frames().items():
            if ident == self._training:
                training, lasti, in_python = _stack(frame), frame.f_lasti, _runs_python(frame)
            elif ident != threading.get_ident():
                # an evaluation's readers have the names of a step's
                name = names.get(ident, f"{UNNAMED} {ident}")
                stacks[f"{name} {ident}" if name in stacks else name] = _stack(frame)
        return {
            "training": training,
            "lasti": lasti,
            "in_python": in_python,
            "threads": stacks,
            "groups": groups,
            "calls": recorded if all_calls else [],
        }


def _is_dummy(thread: threading.Thread) -> bool:
    """Whether Python has only noted a thread of C code, as one of autograd's, that asked for its name."""
    return thread.name.startswith("Dummy-")


def _recorded() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The flight recorder's entries, and in brief by group. Without them an answer still has the stacks."""
    try:
        entries = flight_recorder_entries()
        return entries, [asdict(one) for one in group_calls(entries)]
    except Exception:  # of a torch whose recorder has another form
        return [], []


def _runs_python(frame: FrameType) -> bool:
    """Whether this thread was interrupted at the end of a loop's round or the beginning of a function: only
    there does the interpreter hand over its lock by itself. A thread that waits in C code is at a call.
    """
    instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return "JUMP_BACKWARD" in instruction or instruction == "RESUME"


def _stack(frame: FrameType | None) -> list[list[Any]]:
    """Innermost first: file, line, function. An instruction that belongs to no line, as of an except block's
    end, has None for its line: it is 0 here.
    """
    found: list[list[Any]] = []
    while frame is not None and len(found) < DEEPEST:
        found.append([frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name])
        frame = frame.f_back
    return found
