"""From a DTensor to this rank's part of it."""

from __future__ import annotations

from typing import cast

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, which shares its memory; any other tensor as it is.

    Where gradients are enabled `to_local()` records a graph; this does not.
    """
    return cast(Tensor, tensor._local_tensor) if isinstance(tensor, DTensor) else tensor
