"""The dtypes of --precision and --checkpoint.export_dtype by their names in flags."""

from __future__ import annotations

import torch

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
