"""The dtypes of --precision and --checkpoint.export_dtype by their names in flags; the widest of several."""

from __future__ import annotations

from collections.abc import Iterable

import torch

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def widest_floating(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The widest floating-point one; float32 if there is none."""
    floating = (dtype for dtype in dtypes if dtype.is_floating_point)
    return max(floating, key=lambda dtype: dtype.itemsize, default=torch.float32)
