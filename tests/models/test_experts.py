"""Experts of widths that torch's grouped products do not support are computed one after another, by the sizes
and the dtype of computation alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp.models.hf import select_experts_kernel
from tests.models import foreign

pytestmark = pytest.mark.needs("transformers")


def build(model: str) -> Any:
    return foreign.build(model)


@pytest.mark.parametrize(
    ("model", "dtype", "kernel"),
    [
        ("qwen3_moe", torch.float32, "grouped_mm"),  # 20 wide, of which 4 bytes each are 5 × 16
        ("qwen3_moe", torch.bfloat16, "eager"),
        ("qwen3_moe", torch.float64, "eager"),
        ("mixtral", torch.bfloat16, "grouped_mm"),
        ("odd_moe", torch.float32, "eager"),
        ("gpt_oss", torch.float32, "eager"),
    ],
)
def test_the_loop_replaces_grouped_products_where_torch_has_none(
    model: str, dtype: torch.dtype, kernel: str
) -> None:
    built = build(model)
    select_experts_kernel(built, dtype)
    assert built.config._experts_implementation == kernel
    built.to(dtype)
    inputs = torch.arange(12).view(2, 6)
    built(inputs, labels=inputs).loss.backward()
