"""Fake tensors and dispatch modes: documented by torch, imported from private modules; a forward on them.

Without FakeTensorMode there is no plan and no estimate after an out-of-memory error; without
TorchDispatchMode no account of memory on CPU, no plan, no activation budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
"""Raised by an operation that needs the values of a fake tensor."""

__all__ = ["READS_VALUES", "FakeTensor", "FakeTensorMode", "TorchDispatchMode", "fake_forward"]


@contextmanager
def fake_forward() -> Iterator[FakeTensorMode]:
    """Fake tensors, with stand-ins for what mixtures of experts and layers dropped at random do on them."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _StandIns():
        yield mode


class _StandIns(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if "grouped_mm" in name:
            return _grouped_product(*args, **kwargs)
        if name == "rand" and not any(args) and not kwargs.get("size"):
            return 1.0  # no layer is dropped: a fake tensor has no value to compare
        return func(*args, **kwargs)


def _grouped_product(rows: Tensor, weights: Tensor, *_: Any, **__: Any) -> Tensor:
    """Each row times the matrix of its group, which are as many operations, and a result and gradients as
    large, as all rows times the first. torch's own has a fake kernel for bfloat16 alone, and no count.
    """
    return rows.to(weights.dtype) @ weights[0]
