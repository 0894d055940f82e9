"""One rank's file of a save: its tensors copied to memory beside the next step, framed, checked and written.

The staging buffer is allocated once and reused; pinned for CUDA, where copies run on a stream of their own.
It holds each tensor at its place in the file, with space around it for its frame. Writing runs in a thread
beside the training step: the long calls (crc32, write, fsync) release the GIL.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from zlib import crc32

import torch

from fsdp.base.phases import Activity, announces
from fsdp.checkpoint import file_names, pieces, torch_file
from fsdp.checkpoint.pieces import as_bytes
from fsdp.checkpoint.state import Piece
from fsdp.checkpoint.store import Store

SMALL = 4096  # below this, crc32 over the bytes is cheaper than combining


@dataclass(frozen=True)
class Staged:
    """The copy of a piece. Its frame begins at `start` in the image, the next one at `end`."""

    piece: Piece
    tensor: torch.Tensor
    start: int
    end: int


@dataclass(frozen=True)
class Image:
    """The bytes of a rank's file, and the tensors in it."""

    data: memoryview
    staged: list[Staged]


class StagingMemory(Protocol):
    """File-backed memory for the copies, for a state that does not fit into memory."""

    def take(self, size: int) -> torch.Tensor: ...
    def forget(self, tensors: Iterable[torch.Tensor]) -> None: ...


@dataclass
class Written:
    """A rank's report of its file: size, checksum, and its share of each tensor's digest."""

    file: str
    size: int = 0
    crc: int = 0
    shares: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    """Digests of this rank's own buffers; the checkpoint keeps rank 0's buffers."""


class Staging:
    def __init__(self, device: torch.device, memory: StagingMemory | None = None) -> None:
        self._memory = memory
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._unpin: Callable[[], object] = lambda: None

    def copy(self, parts: Sequence[Piece], ready: torch.cuda.Event | None) -> Image:
        """Copies the pieces: completed on return on a CPU, queued on CUDA, after the event `ready`."""
        starts = [0]
        for piece in parts:
            starts.append(torch_file.aligned(starts[-1] + torch_file.item_length(piece.nbytes)))
        self._reserve(starts[-1])
        staged = []
        for piece, start, end in zip(parts, starts, starts[1:], strict=False):
            flat = self._buffer[start + torch_file.HEAD :][: piece.nbytes]
            tensor = flat.view(piece.local.dtype).view(piece.local.shape)
            staged.append(Staged(piece, tensor, start, end))
        self._run(staged, ready)
        return Image(as_bytes(self._buffer)[: starts[-1]], staged)

    def forget(self, *tensors: torch.Tensor) -> None:
        """Releases the pages of tensors in file-backed memory; they are read again when needed."""
        if self._memory is not None:
            self._memory.forget(tensors)

    def _run(self, staged: list[Staged], ready: torch.cuda.Event | None) -> None:
        if self._stream is None:
            for copy in staged:
                _copy_quietly(copy.piece.local, copy.tensor)
                self.forget(copy.piece.local, copy.tensor)
            return
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            for copy in staged:
                copy.tensor.copy_(copy.piece.local, non_blocking=True)

    def event(self) -> torch.cuda.Event | None:
        """An event after the copies queued so far, for the optimizer's stream to wait on; None on a CPU."""
        return self._stream.record_event() if self._stream is not None else None

    def _reserve(self, size: int) -> None:
        if self._buffer.numel() >= size:
            return
        if self._memory is not None:
            self._buffer = self._memory.take(size)
            return
        self._unpin()
        self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old one before the new one is allocated
        # Begins at a page: a direct write (O_DIRECT) needs it.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._buffer = torch.frombuffer(memory, dtype=torch.uint8)
        if self._stream is not None:
            self._unpin = _pinned(self._buffer, self)


def _pinned(buffer: torch.Tensor, owner: object) -> Callable[[], object]:
    """Pins the memory until the returned function is called or `owner` is gone. pin_memory=True would round
    up to a power of two: up to twice the state.
    """
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 1)))
    # It refers to the buffer: unmapped while pinned, its address could not be pinned again.
    unpin = weakref.finalize(owner, _unpin, buffer)
    unpin.atexit = False  # the process's end frees it, and CUDA may have ended by then
    return unpin


def _unpin(buffer: torch.Tensor) -> None:
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())))


def _copy_quietly(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies in this thread alone: torch's copy would wake a pool of threads on the step's cores."""
    if source.is_contiguous() and source.numel():
        as_bytes(target)[:] = as_bytes(source)
    else:
        target.copy_(source)


# ---------------------------------------------------------------- writing


@announces(Activity.STORAGE)
def write_file(
    store: Store, folder: str, rank: int, image: Image, values: list[bytes], staging: Staging
) -> Written:
    """Writes this rank's file; `values` are the pickled values other than tensors, on rank 0."""
    written = Written(file_names.data_file(rank))
    for copy in image.staged:
        _frame(image, copy, written)
        written.shares[copy.piece.key] = pieces.digest(copy.tensor, copy.piece.offsets, copy.piece.size)
        staging.forget(copy.tensor)
    for value in values:
        written.crc = crc32(value, written.crc)
    written.size = len(image.data) + sum(map(len, values))
    store.write(folder, written.file, [image.data, *values])
    staging.forget(*(copy.tensor for copy in image.staged))
    return written


def _frame(image: Image, copy: Staged, written: Written) -> None:
    """Writes head and tail around the data, and adds all three to the file's checksum in one pass."""
    count = copy.tensor.nbytes
    first = copy.start + torch_file.HEAD
    data = image.data[first : first + count]
    data_crc = crc32(data)
    head, tail = torch_file.frame(copy.tensor.dtype, tuple(copy.tensor.shape), count, data_crc)
    tail += bytes(copy.end - first - count - len(tail))
    image.data[copy.start : first] = head
    image.data[first + count : copy.end] = tail
    crc = crc32(head, written.crc)
    crc = crc32(data, crc) if count < SMALL else torch_file.combine(crc, data_crc, count)
    written.crc = crc32(tail, crc)
