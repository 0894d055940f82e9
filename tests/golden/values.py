"""What a finished run is compared by: its numbers of each step and its exported weights."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch

NUMBERS = ("loss", "grad_norm", "eval_loss", "eval_ema_loss")
TOLERANCE = 1e-9
"""Of values that another processor computed in fp64: its sums are rounded in another order."""
Values = dict[str, Any]


def values_of(run: Path) -> Values:
    """Of each number its value by step, of each tensor a projection, and a digest of all tensors' bits."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    values: Values = {
        key: {str(record["step"]): record[key] for record in records if key in record} for key in NUMBERS
    }
    weights, digest = {}, hashlib.sha256()
    for file in sorted(run.glob("full_model*/full-model.pt")):
        for name, tensor in sorted(torch.load(file, weights_only=True).items()):
            key = f"{file.parent.name}/{name}"
            pattern = torch.arange(tensor.numel(), dtype=torch.float64) % 7 - 2.5
            weights[key] = float(tensor.double().flatten() @ pattern)
            digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return {**values, "weights": weights, "digest": digest.hexdigest()}


def difference(first: Values, second: Values, tolerance: float = TOLERANCE) -> str:
    """The first value of `second` that differs, in words; empty if none does. 0 compares bits."""
    for key in second.keys() - {"digest", "ranks"}:
        if first[key].keys() != second[key].keys():
            return f"{key}: {sorted(first[key])} and {sorted(second[key])}"
        for name, value in first[key].items():
            other = second[key][name]
            both_nan = math.isnan(value) and math.isnan(other)  # of a step that fp16's scale skips
            if not both_nan and not math.isclose(value, other, rel_tol=tolerance, abs_tol=tolerance):
                return f"{key} of {name}: {value!r} and {other!r}"
    return "exported weights" if tolerance == 0 and first["digest"] != second["digest"] else ""
