"""Operations that write into a tensor that recomputation keeps.

The version counter does not show all of them: `torch.matmul` returns a batched product as a view that has
a counter of its own. What is kept would be the value after the write, and backward would write a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from fsdp.base.torch_private.core import TorchDispatchMode, schema, tree_leaves


def storage_of(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())


def written_by(operator: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operator writes into."""
    found: list[Tensor] = []
    for place, argument in enumerate(schema(operator).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else (kwargs or {}).get(argument.name)
        found += [one for one in tree_leaves(value) if isinstance(one, Tensor)]
    return found


class WrittenResults(TorchDispatchMode):
    """Finds the calls of `operators` whose results later operations write into."""

    def __init__(self, operators: Collection[Any]) -> None:
        super().__init__()
        self._operators, self._counts = operators, Counter[Any]()
        self._results: list[tuple[tuple[Any, int], Tensor]] = []
        self._written: set[tuple[Any, int]] = set()
        self._ended = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._results and (changed := {storage_of(one) for one in written_by(func, args, kwargs)}):
            self._written |= {key for key, one in self._results if storage_of(one) in changed}
        out = func(*args, **(kwargs or {}))
        if func in self._operators:
            key = (func, self._counts[func])
            self._counts[func] += 1
            self._results += [(key, one) for one in tree_leaves(out) if isinstance(one, Tensor)]
        return out

    def during(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A forward that is watched; not when backward repeats it."""
        if self._ended:
            return forward(*args, **kwargs)
        with self:
            return forward(*args, **kwargs)

    def take(self) -> frozenset[tuple[Any, int]]:
        """Each call as its operator and index. Frees the results, held so that no other tensor has the
        address of their storage.
        """
        self._results, self._ended = [], True
        return frozenset(self._written)


def random_streams() -> Callable[[], None]:
    """Returns a function that restores the random streams to their state now."""
    host = torch.get_rng_state()
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore() -> None:
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device)

    return restore
