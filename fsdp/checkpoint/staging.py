"""The staging buffer: one rank's part of a save, copied while the next step runs forward and backward.

Allocated once and reused; pinned for CUDA, where copies run on a stream of their own. It holds what this rank writes, no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fsdp.checkpoint import container
from fsdp.checkpoint.plan import Part
from fsdp.checkpoint.snapshot import Piece


@dataclass(frozen=True)
class Staged:
    """A part's copy: `flat` are its bytes, `tensor` the same memory with its type and shape."""

    piece: Piece
    part: Part
    tensor: torch.Tensor
    flat: memoryview


class Staging:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    def copy(self, pieces: Sequence[Piece], parts: Sequence[Part], ready: torch.cuda.Event | None) -> list[Staged]:
        """The copies: done on return on a CPU, begun on CUDA. `ready` marks the state there as computed."""
        sources = [rows(pieces[part.index].local, part) for part in parts]
        self._reserve(sum(container.aligned(nbytes(source)) for source in sources))
        staged, at = [], 0
        for source, part in zip(sources, parts, strict=True):
            flat = self._buffer[at : at + nbytes(source)]
            view = flat.view(source.dtype).view(source.shape)
            staged.append(Staged(pieces[part.index], part, view, flat.numpy().data))
            at += container.aligned(nbytes(source))
        if self._stream is None:
            for source, one in zip(sources, staged, strict=True):
                one.tensor.copy_(source)
            return staged
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            for source, one in zip(sources, staged, strict=True):
                one.tensor.copy_(source, non_blocking=True)
        return staged

    def event(self) -> torch.cuda.Event | None:
        """Marks the end of the copies begun so far: the optimizer's stream waits for it, the host need not."""
        return self._stream.record_event() if self._stream is not None else None

    def _reserve(self, size: int) -> None:
        if self._buffer.numel() >= size:
            return
        self._buffer = torch.empty(0, dtype=torch.uint8)  # let the old one go before the new one comes
        self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)


def rows(local: torch.Tensor, part: Part) -> torch.Tensor:
    return local[part.first : part.last] if local.dim() else local


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
