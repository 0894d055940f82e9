"""The files of an export: all are whole before the first one gets its name, and the index gets its name last.

A reader sees the old export, the new one, or, in the moment between them, one without an index, which it
refuses. Not here: what the files hold (export.py).
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fsdp.checkpoint.adapter_weights import PEFT
from fsdp.checkpoint.full_state import INDEX_FILE
from fsdp.checkpoint.local_store import sync_folder
from fsdp.checkpoint.pretrained import SINGLE_FILE

log = logging.getLogger(__name__)

_STAGED = re.compile(r"\..+\.tmp-[0-9a-f]{16}")


class ExportFiles:
    """New files of a folder under temporary names, until `take_names`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._staged: dict[Path, Path] = {}
        self._old: set[Path] = set()

    def add(self, file: Path, write: Callable[[BinaryIO], object]) -> None:
        """Writes and syncs a file under a temporary name."""
        file.parent.mkdir(parents=True, exist_ok=True)
        # "x" and a random name: an existing link is not written through.
        staged = file.with_name(f".{file.name}.tmp-{secrets.token_hex(8)}")
        self._staged[file] = staged
        with staged.open("xb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())

    def replace(self, *old: Path) -> None:
        """Deletes these files of an earlier export when the new ones take their names."""
        self._old |= set(old)

    def take_names(self) -> list[Path]:
        """Gives the new files their names; returns them."""
        names, index = list(self._staged), self.folder / INDEX_FILE
        old = {file for file in self._old if file.exists()}
        # A reader begins with one of these. A single file is itself replaced by one rename.
        for file in old & ({index, self.folder / SINGLE_FILE} - (self._staged.keys() - {index})):
            file.unlink()
        sync_folder(self.folder)  # or a power cut could keep the old index beside new parts
        for file in sorted(names, key=lambda one: one == index):
            if file == index:
                sync_folder(self.folder)
            self._staged[file].rename(file)
            del self._staged[file]
        for file in old - set(names):
            file.unlink(missing_ok=True)
        for folder in {file.parent for file in names}:
            sync_folder(folder)
        return names

    def discard(self) -> None:
        """Deletes what has not got its name."""
        for staged in self._staged.values():
            staged.unlink(missing_ok=True)


@contextmanager
def new_files(folder: Path) -> Iterator[ExportFiles]:
    """Makes the folder, deletes what a killed export left there, and, if the block fails, what it wrote.

    A second export into the folder waits for the end of the first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, folder)
        # Not in all folders below: another export may be at work there.
        for file in (*folder.glob(".*.tmp-*"), *(folder / PEFT).glob(".*.tmp-*")):
            if _STAGED.fullmatch(file.name) and file.is_file():
                file.unlink()
        files = ExportFiles(folder)
        try:
            yield files
        finally:
            files.discard()
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.warning("another process exports to %s: waiting for its end", folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:  # a file system without locks
        log.debug("%s cannot be locked: %s", folder, error)
