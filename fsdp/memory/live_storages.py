"""The storages that exist, each with what a tracker holds about it until it is released.

A storage is known by the address of its object, which is one for all tensors that share it; a weak reference
reports the release. Not here: what is counted (account_storages.py, fsdp/plan/tracker.py).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Held = TypeVar("Held")


class LiveStorages(Generic[Held]):
    """`released` is called with what was held about a storage when that is gone."""

    def __init__(self, released: Callable[[Held], None]) -> None:
        self._released = released
        self._known: dict[int, tuple[Held, weakref.ref[torch.UntypedStorage]]] = {}

    def get(self, storage: torch.UntypedStorage) -> Held | None:
        """None for a storage that was not added."""
        found = self._known.get(id(storage))
        return None if found is None else found[0]

    def add(self, storage: torch.UntypedStorage, held: Held) -> None:
        key = id(storage)
        self._known[key] = (held, weakref.ref(storage, functools.partial(self._gone, key)))

    def clear(self) -> None:
        """Drops all weak references: no release is reported any more."""
        self._known.clear()

    def _gone(self, key: int, _: Any) -> None:
        self._released(self._known.pop(key)[0])
