"""Fake tensors and dispatch modes: documented by torch, imported from private modules.

Without FakeTensorMode there is no plan and no estimate after an out-of-memory error; without
TorchDispatchMode no account of memory on CPU, no plan, no activation budget.
"""

from __future__ import annotations

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

READS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
"""Raised by an operation that needs the values of a fake tensor."""

__all__ = ["READS_VALUES", "FakeTensor", "FakeTensorMode", "TorchDispatchMode"]
