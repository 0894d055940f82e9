"""From a DTensor to this rank's part of it, and from nested values to the tensors in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, which shares its memory; any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not torch.is_grad_enabled():
        return tensor.to_local()
    with torch.no_grad():  # or to_local records a graph
        return tensor.to_local()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in lists, tuples and mappings of any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
