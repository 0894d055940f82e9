"""The staging buffer: one rank's file of a save in memory, copied while the next step runs.

Allocated once and reused; pinned for CUDA, where copies run on a stream of their own. It holds the tensors
that this rank writes, each at its place in the file, with space before and after it for its frame, which
rank_file.py fills in.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fsdp.checkpoint import torch_file
from fsdp.checkpoint.snapshot import Piece
from fsdp.checkpoint.tensor_reader import as_bytes
from fsdp.checkpoint.write_plan import Part


@dataclass(frozen=True)
class Staged:
    """The copy of a part. `start` is where its frame begins in the image, `end` where the next one begins."""

    piece: Piece
    part: Part
    tensor: torch.Tensor
    start: int
    end: int


@dataclass(frozen=True)
class Image:
    """The bytes of a rank's file, and the tensors in it. `forget` releases the pages of a tensor."""

    data: memoryview
    staged: list[Staged]
    forget: Callable[[torch.Tensor], None]


class StagingMemory(Protocol):
    """File-backed memory for the copies, for a state that does not fit into memory."""

    def take(self, size: int) -> torch.Tensor: ...
    def forget(self, tensors: Iterable[torch.Tensor]) -> None: ...


class Staging:
    def __init__(self, device: torch.device, memory: StagingMemory | None = None) -> None:
        self._memory = memory
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._unpin: Callable[[], object] = lambda: None

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    def copy(self, pieces: Sequence[Piece], parts: Sequence[Part], ready: torch.cuda.Event | None) -> Image:
        """Copies the parts: completed on return on a CPU, queued on CUDA, after the event `ready`."""
        sources = [rows(pieces[part.index].local, part) for part in parts]
        places = _places(sources)
        self._reserve(places[-1])
        staged = []
        for nth, (source, part) in enumerate(zip(sources, parts, strict=True)):
            flat = self._buffer[places[nth] + torch_file.HEAD :][: nbytes(source)]
            tensor = flat.view(source.dtype).view(source.shape)
            staged.append(Staged(pieces[part.index], part, tensor, places[nth], places[nth + 1]))
        self._run(sources, [one.tensor for one in staged], ready)
        return Image(as_bytes(self._buffer)[: places[-1]], staged, self.forget)

    def forget(self, *tensors: torch.Tensor) -> None:
        """Releases the pages of tensors in file-backed memory; they are read again when needed."""
        if self._memory is not None:
            self._memory.forget(tensors)

    def _run(
        self, sources: list[torch.Tensor], targets: list[torch.Tensor], ready: torch.cuda.Event | None
    ) -> None:
        if self._stream is None:
            for source, target in zip(sources, targets, strict=True):
                copy_quietly(source, target)
                self.forget(source, target)
            return
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)

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


def _places(sources: list[torch.Tensor]) -> list[int]:
    """Where each item begins in the file, and where the last one ends, as metadata_pickle.py counts."""
    places = [0]
    for source in sources:
        places.append(torch_file.aligned(places[-1] + torch_file.item_length(nbytes(source))))
    return places


def copy_quietly(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies in this thread alone: torch's copy would wake a pool of threads on the step's cores."""
    if source.is_contiguous() and source.numel():
        as_bytes(target)[:] = as_bytes(source)
    else:
        target.copy_(source)


def rows(local: torch.Tensor, part: Part) -> torch.Tensor:
    return local[part.first : part.last] if local.dim() else local


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes
