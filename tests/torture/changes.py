"""Waits until a name appears in one of some folders, without looking again and again: inotify.

A loop that looks every half millisecond takes a tenth of a processor from the ranks that it waits for, and
sees less.
"""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Iterable
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_CREATE, _MOVED_TO, _ONLY_FOLDERS = 0x100, 0x80, 0x1000000
_BUFFER = 1 << 16


class Changes:
    """Watch before a look: what comes after it ends the next wait."""

    def __init__(self) -> None:
        self._descriptor = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")

    def watch(self, folders: Iterable[Path]) -> None:
        """Folders watched already, or that do not exist, change nothing."""
        for folder in folders:
            _LIBC.inotify_add_watch(
                self._descriptor, os.fsencode(folder), _CREATE | _MOVED_TO | _ONLY_FOLDERS
            )

    def wait(self, timeout_s: float, ends: Iterable[int] = ()) -> None:
        """Until a name appears, one of the descriptors `ends` can be read, or the time is over."""
        waits = select.poll()
        for one in (self._descriptor, *ends):
            waits.register(one, select.POLLIN)
        waits.poll(max(0.0, timeout_s) * 1000)
        try:
            os.read(self._descriptor, _BUFFER)
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self._descriptor)
