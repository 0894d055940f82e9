"""Memory in a mapped file: reserved whole before it is used, and without a name.

A file is unlinked as soon as it is open, so however a run ends, kill -9 included, the kernel frees the space.
Pages are loaded when they are touched and dropped on `forget`; what was written is in the file then. The
kernel may keep such pages as cache, which it frees when memory is needed. Not here: what the files hold.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fsdp.base.errors import ConfigError
from fsdp.base.text import byte_size, counted
from fsdp.dist import collectives

log = logging.getLogger(__name__)

ALIGN = 64  # as torch aligns what it allocates


class MappedFile:
    """`size` bytes of disk as memory, allocated from front to back."""

    def __init__(self, folder: Path, size: int) -> None:
        self.size = max(size, mmap.PAGESIZE)
        descriptor = _open_nameless(folder)
        try:
            # Blocks are allocated now: a disk that fills up later would end the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, self.size)
            self._memory = mmap.mmap(descriptor, self.size)
        finally:
            os.close(descriptor)
        self._base: int = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
        self._next = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next piece, zeroed; its storage is its own, which FSDP compares by address."""
        numel = torch.Size(shape).numel()
        start, self._next = self._next, self._next + room_for(numel * dtype.itemsize)
        assert self._next <= self.size, f"{self._next} bytes of a file of {self.size}"
        if not numel:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=start).view(torch.Size(shape))

    def restart(self) -> None:
        """Allocates from the front again: earlier pieces are no longer used."""
        self._next = 0

    def holds(self, tensor: Tensor) -> bool:
        return bool(tensor.numel()) and self._base <= tensor.data_ptr() < self._base + self.size

    def forget(self, tensor: Tensor) -> None:
        """Drops the tensor's pages from this process; a touch loads them again. Neighbours in the
        outermost pages only fault again.
        """
        self._advise(tensor, mmap.MADV_DONTNEED)

    def fetch(self, tensor: Tensor) -> None:
        """Starts loading its pages ahead of their use."""
        self._advise(tensor, mmap.MADV_WILLNEED)

    def _advise(self, tensor: Tensor, advice: int) -> None:
        first = tensor.data_ptr() - self._base
        start = first // mmap.PAGESIZE * mmap.PAGESIZE
        self._memory.madvise(advice, start, first + tensor.nbytes - start)


def room_for(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _open_nameless(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".shardrun-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    path.unlink()
    return descriptor


# ---------------------------------------------------------------- is there room, on every rank


@dataclass(frozen=True)
class _DiskNeed:
    """The bytes that one rank needs, and those free on its disk. `disk` is equal for ranks that share it."""

    host: str
    disk: int
    needed: int
    free: int
    trouble: str


def reserve(folder: Path, sizes: Iterable[int], *, flag: str, what: str) -> list[MappedFile]:
    """A file of each size on every rank, or one ConfigError on all of them and nothing left behind.
    Collective.
    """
    sizes, what = list(sizes), collectives.broadcast_object(what)
    needs = collectives.all_gather_objects(_disk_need(folder, sum(sizes)))
    _refuse(needs, folder, flag, what)
    files: list[MappedFile] = []
    trouble = ""
    try:
        files = [MappedFile(folder, size) for size in sizes]
    except OSError as error:
        trouble = f"{socket.gethostname()}: {errno.errorcode.get(error.errno or 0, '')}, {error.strerror}"
    troubles = [text for text in collectives.all_gather_objects(trouble) if text]
    if troubles:
        files.clear()
        raise ConfigError(
            f"--{flag} {folder}: {what} could not be reserved ({troubles[0]}).", f"--{flag} a larger disk"
        )
    if (kind := file_system(folder)) in ("tmpfs", "ramfs"):
        log.warning("--%s %s is %s: what is put there stays in memory", flag, folder, kind)
    return files


def _disk_need(folder: Path, needed: int) -> _DiskNeed:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        state = os.statvfs(folder)
        return _DiskNeed(
            socket.gethostname(), folder.stat().st_dev, needed, state.f_bavail * state.f_frsize, ""
        )
    except OSError as error:
        return _DiskNeed(socket.gethostname(), 0, needed, 0, error.strerror or str(error))


def _refuse(needs: list[_DiskNeed], folder: Path, flag: str, what: str) -> None:
    for rank, one in enumerate(needs):
        if one.trouble:
            raise ConfigError(
                f"--{flag} {folder} cannot be used on rank {rank} ({one.trouble}).",
                f"--{flag} DIR on a local disk",
            )
        sharers = [other for other in needs if (other.host, other.disk) == (one.host, one.disk)]
        total = sum(other.needed for other in sharers)
        free = min(other.free for other in sharers)
        if total > free:
            raise ConfigError(
                f"{what} of {counted(len(sharers), 'rank')} {'take' if len(sharers) > 1 else 'takes'} "
                f"{byte_size(total)}, but {folder} on {one.host} has {byte_size(free)} free.",
                f"--{flag} a folder on a larger disk",
            )


def file_system(folder: Path) -> str:
    """The file system's type as the kernel names it; empty if it cannot be read."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    place, kinds = folder.resolve(), {}
    for line in lines:
        left, _, right = line.partition(" - ")
        kinds[Path(left.split()[4])] = right.split()[0]
    return next((kinds[one] for one in (place, *place.parents) if one in kinds), "")
