"""Checks the folder of the checkpoints: all nodes share it, and how fast each writes and reads it.

A node reads another node's file: its own would come from memory.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BLOCK = 4 << 20
PATIENCE_S = 5.0
"""Time for a shared folder to show another node's file."""


def write(folder: Path, name: str, size: int) -> dict[str, Any]:
    """Write and sync a file of `size` bytes: MB/s, and the free space afterwards."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        block = os.urandom(BLOCK)
        began = time.perf_counter()
        with (folder / name).open("wb") as file:
            for _ in range(size // BLOCK):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        return {"write_mb_s": size / seconds / 1e6, "free": shutil.disk_usage(folder).free}
    except OSError as error:
        return {"error": f"cannot be written ({error.strerror})"}


def unseen(folder: Path, names: Mapping[int, str], patience_s: float = PATIENCE_S) -> list[int]:
    """The nodes whose file does not appear here."""
    deadline = time.monotonic() + patience_s
    missing = dict(names)
    while missing:
        present = _listed(folder)
        missing = {node: name for node, name in missing.items() if name not in present}
        if not missing or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return sorted(missing)


def _listed(folder: Path) -> set[str]:
    """Empty for a folder that is not there, or may not be listed."""
    try:
        return set(os.listdir(folder))  # noqa: PTH208  refreshes NFS's cache
    except OSError:
        return set()


def read(file: Path) -> dict[str, Any]:
    """MB/s from the storage: this node's cached pages of the file are dropped first."""
    try:
        with file.open("rb", buffering=0) as source:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began, count = time.perf_counter(), 0
            while block := source.read(BLOCK):
                count += len(block)
        return {"read_mb_s": count / max(time.perf_counter() - began, 1e-9) / 1e6}
    except OSError as error:
        return {"error": f"cannot be read ({error.strerror})"}
