"""Floating point operations of one training sample by the model's own arithmetic: counted once, on fake
tensors, unsharded.

Recomputation is not counted: MFU is the share of the device that the model uses. Not here: the devices' peaks
(fsdp/base/devices.py).
"""

from __future__ import annotations

import copy
import logging

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fsdp.base import devices
from fsdp.base.errors import first_line
from fsdp.base.torch_private.core import fake_forward
from fsdp.data import DataSet
from fsdp.models.hf_settings import group_experts
from fsdp.models.init import to_empty
from fsdp.models.loss import CustomLoss, LossFunction
from fsdp.models.packed import POSITIONS

log = logging.getLogger(__name__)

BACKWARD = 2.0
"""The backward of a matrix product is two products of its size."""


def flops_per_sample(model: nn.Module, data: DataSet, loss: CustomLoss | None = None) -> float:
    """Forward and backward of one sample. `model` is on meta; one that reads values is not counted: 6 a
    parameter and token, and attention's where the model's configuration has its sizes.
    """
    formula, words = _formula(model, max(1, data.info.tokens_per_sample))
    try:
        counted = (1 + BACKWARD) * _forward(model, data, loss)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError, KeyError) as error:
        log.info("MFU by %s: its products cannot be counted (%s)", words, first_line(error, 80))
        return formula
    log.info("MFU by %.4g operations a sample, counted; %s is %.4g", counted, words, formula)
    return counted


def _formula(model: nn.Module, tokens: int) -> tuple[float, str]:
    config = getattr(model, "config", None)
    layers, width = (getattr(config, name, 0) for name in ("num_hidden_layers", "hidden_size"))
    parameters = sum(p.numel() for p in model.parameters())
    if isinstance(layers, int) and isinstance(width, int) and layers * width:
        attention, words = (
            12 * layers * width * tokens,
            "(6 × parameters + 12 × layers × width × tokens) × tokens",
        )
    else:
        attention, words = 0, "6 × parameters × tokens"
    return float((6 * parameters + attention) * tokens), words


def _forward(model: nn.Module, data: DataSet, loss: CustomLoss | None) -> float:
    """On fake tensors, of which models of transformers read no values; on meta they do."""
    sample = data.train.batch(np.zeros(1, np.int64))
    model = copy.deepcopy(model)
    group_experts(model)
    counter = FlopCounterMode(display=False)
    with fake_forward() as mode, torch.no_grad():
        to_empty(model, "cpu")
        # transformers reads the values of positions: a packed row counts as one document.
        first = {name: mode.from_tensor(value) for name, value in sample.items() if name != POSITIONS}
        valid = torch.ones(1, dtype=torch.bool)
        # attention as its products: not every fused kernel is in the counter's table
        with counter, sdpa_kernel(SDPBackend.MATH):
            LossFunction(model, loss)(model, first, valid, 1)
    total = float(counter.get_total_flops())
    if not total:
        raise ValueError("nothing in it was counted")
    return total


def peak_flops(device: torch.device, ranks: int) -> float:
    """The peak of all devices together; 0 if unknown."""
    if device.type != "cuda":
        return 0.0
    known = devices.find(torch.cuda.get_device_name(device))
    return known.bf16_tflops * 1e12 * ranks if known else 0.0
