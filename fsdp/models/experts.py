"""Selects transformers' loop over experts where torch's grouped products do not support the dtype.

transformers is not imported: a model is any module with `set_experts_implementation`. Not here: the choice of
--model.args.experts_implementation (hf.py).
"""

from __future__ import annotations

import torch
from torch import nn

GROUPED, LOOP = "grouped_mm", "eager"


def select_experts_kernel(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces grouped products, transformers' default, in a model that computes in float64:
    torch.nn.functional.grouped_mm takes float32, bfloat16 and float16.
    """
    select = getattr(model, "set_experts_implementation", None)
    chosen = getattr(getattr(model, "config", None), "_experts_implementation", None)
    if dtype == torch.float64 and callable(select) and chosen == GROUPED:
        select(LOOP)
