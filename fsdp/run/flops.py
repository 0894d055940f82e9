"""Floating point operations of one training sample by the model's own arithmetic: counted once, on the meta
device, unsharded.

Recomputation is not counted: MFU is the share of the device that the model uses. Not here: the devices' peaks
(fsdp/base/devices.py).
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fsdp.base import devices
from fsdp.base.errors import first_line
from fsdp.data import DataSet
from fsdp.models.custom_loss import CustomLoss
from fsdp.models.loss import LossFunction
from fsdp.models.packed_attention import POSITIONS

log = logging.getLogger(__name__)

BACKWARD = 2.0
"""The backward of a matrix product is two products of its size."""


def flops_per_sample(model: nn.Module, data: DataSet, loss: CustomLoss | None = None) -> float:
    """Forward and backward of one sample. `model` is on meta; a model that cannot run there counts 6 a
    parameter and token.
    """
    try:
        return (1 + BACKWARD) * _forward(model, data, loss)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError) as error:
        # A model that reads values cannot run on meta.
        log.info(
            "MFU by 6 × parameters × tokens: the model cannot be counted on meta (%s)",
            first_line(error, 80),
        )
        return 6.0 * sum(p.numel() for p in model.parameters()) * max(1, data.info.tokens_per_sample)


def _forward(model: nn.Module, data: DataSet, loss: CustomLoss | None) -> float:
    sample = data.train.batch(np.zeros(1, np.int64))
    # transformers reads the values of positions: a packed row counts as one document.
    first = {name: value.to("meta") for name, value in sample.items() if name != POSITIONS}
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        LossFunction(model, loss)(model, first, torch.ones(1, dtype=torch.bool, device="meta"), 1)
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
