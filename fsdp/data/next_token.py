"""Windows of tokens as a language model's inputs and targets."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def shifted(windows: np.ndarray) -> dict[str, Tensor]:
    """Splits [n, seq_len + 1] tokens into inputs and targets, the token that follows each."""
    tokens = torch.from_numpy(windows.astype(np.int64))
    return {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
