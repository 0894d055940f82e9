"""From a DTensor to this rank's part of it."""

from __future__ import annotations

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
