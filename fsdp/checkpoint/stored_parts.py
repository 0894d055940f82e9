"""Where the rows of a tensor lie in a checkpoint's files: from its layout, or from its `.metadata`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from fsdp.checkpoint import file_names, pieces
from fsdp.checkpoint.layout import Layout, Writers
from fsdp.checkpoint.pieces import Sizes


class StoredPart(NamedTuple):
    """A part of a tensor: the place of its stream in a file, and its box in the whole tensor."""

    file: str
    offset: int
    length: int
    offsets: Sizes
    sizes: Sizes


class StoredParts(Protocol):
    def overlapping(self, key: str, offsets: Sizes, sizes: Sizes) -> Iterator[StoredPart]:
        """The parts of a tensor that share elements with a box."""

    def memory(self, key: str) -> object:
        """Equal for all keys of a tied weight."""

    def order(self, key: str) -> int:
        """The order in which `overlapping` costs least."""


class PartsOfLayout:
    """The places in a file follow from all tensors before: the last tensor's are kept, for the next one."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._tensor = {key: nth for nth, tensor in enumerate(layout.tensors) for key, _ in tensor.keys}
        self._places = layout.places()
        self._last: tuple[int, Writers, np.ndarray, np.ndarray] | None = None

    def overlapping(self, key: str, offsets: Sizes, sizes: Sizes) -> Iterator[StoredPart]:
        _, writers, begins, lengths = self._move_to(self._tensor[key])
        start, size = np.array(offsets, np.int64), np.array(sizes, np.int64)
        shares = (writers.offsets < start + size) & (writers.offsets + writers.sizes > start)
        for row in np.flatnonzero(shares.all(axis=1)).tolist():
            yield StoredPart(
                file_names.data_file(int(writers.ranks[row])),
                int(begins[row]),
                int(lengths[row]),
                tuple(writers.offsets[row].tolist()),
                tuple(writers.sizes[row].tolist()),
            )

    def _move_to(self, tensor: int) -> tuple[int, Writers, np.ndarray, np.ndarray]:
        if self._last is None or tensor < self._last[0]:
            self._places = self._layout.places()
            self._last = next(self._places)
        while self._last[0] < tensor:
            self._last = next(self._places)
        return self._last

    def memory(self, key: str) -> object:
        return self._tensor.get(key, key)

    def order(self, key: str) -> int:
        return self._tensor[key]


@dataclass(frozen=True)
class PartsOfMetadata:
    metadata: Metadata

    def overlapping(self, key: str, offsets: Sizes, sizes: Sizes) -> Iterator[StoredPart]:
        entry = self.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks:
            box = tuple(chunk.offsets), tuple(chunk.sizes)
            if pieces.overlap((offsets, sizes), box) is not None:
                info = self.metadata.storage_data[MetadataIndex(key, chunk.offsets)]
                yield StoredPart(info.relative_path, info.offset, info.length, *box)

    def memory(self, key: str) -> object:
        entry = self.metadata.state_dict_metadata[key]
        if not isinstance(entry, TensorStorageMetadata) or not entry.chunks:
            return key
        info = self.metadata.storage_data[MetadataIndex(key, entry.chunks[0].offsets)]
        return info.relative_path, info.offset

    def order(self, key: str) -> int:
        return 0


@dataclass(frozen=True)
class RenamedParts:
    """Parts under other keys: `stored` maps a key to the one that the checkpoint has."""

    parts: StoredParts
    stored: Mapping[str, str]

    def overlapping(self, key: str, offsets: Sizes, sizes: Sizes) -> Iterator[StoredPart]:
        return self.parts.overlapping(self.stored.get(key, key), offsets, sizes)

    def memory(self, key: str) -> object:
        return self.parts.memory(self.stored.get(key, key))

    def order(self, key: str) -> int:
        return self.parts.order(self.stored.get(key, key))
