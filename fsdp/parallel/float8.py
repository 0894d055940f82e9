"""Matrix products in float8, by torchao: weights, inputs and gradients are scaled and rounded on the way into
each product.

tensorwise has one scale a tensor and gathers sharded weights in float8, a byte an element; rowwise has a
scale a row, is closer to bf16, and gathers weights as they are computed in. Layers are converted within the
model's blocks, where sizes are multiples of 16: a head and an embedding keep their precision. What is kept
and updated stays fp32.

It needs compute capability 8.9 (rowwise 9.0). --speed.float8_emulate does the rounding anywhere, in slow
products: for tests.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.config import SpeedSection
from fsdp.models.units import blocks_of

NEEDED = {"tensorwise": (8, 9), "rowwise": (9, 0)}


def check_float8(speed: SpeedSection, device: torch.device) -> None:
    """Checks that this machine supports the flags, before any process group exists."""
    if speed.float8 == "off":
        return
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"--speed.float8 {speed.float8} needs torchao, which is not installed.", "pip install torchao"
        )
    if speed.float8_emulate:
        return
    if device.type != "cuda":
        raise ConfigError(
            f"--speed.float8 {speed.float8} needs a GPU that multiplies in float8, and this is "
            f"{device.type}.",
            "--speed.float8 off, or --speed.float8_emulate true to try the rounding",
        )
    has, needed = torch.cuda.get_device_capability(device), NEEDED[speed.float8]
    if has < needed:
        raise ConfigError(
            f"--speed.float8 {speed.float8} needs compute capability {needed[0]}.{needed[1]}, and "
            f"{torch.cuda.get_device_name(device)} has {has[0]}.{has[1]}.",
            "--speed.float8 off",
        )


def check_float8_tokens(speed: SpeedSection, samples: int, seq_len: int) -> None:
    """Checks the tokens of a micro-batch: products for weights' gradients sum over them in steps of 16, and
    padding would copy them. `seq_len` is 0 for data that are not tokens.
    """
    tokens = samples * seq_len
    if speed.float8 == "off" or speed.float8_emulate or tokens % 16 == 0:
        return
    raise ConfigError(
        f"--speed.float8 {speed.float8} needs micro-batches of a multiple of 16 tokens, and "
        f"--train.micro_batch times --data.seq_len is {tokens:,}.",
        f"--data.seq_len {math.ceil(seq_len / 16) * 16}, or --speed.float8 off",
    )


def convertible(units: Sequence[Sequence[nn.Module]]) -> list[nn.Linear]:
    """The layers that a float8 product takes: the hardware requires sizes that are multiples of 16."""
    blocks = blocks_of([list(unit) for unit in units])
    layers = dict.fromkeys(m for block in blocks for m in block.modules() if type(m) is nn.Linear)
    return [m for m in layers if m.in_features % 16 == 0 and m.out_features % 16 == 0]


def apply_float8(units: Sequence[Sequence[nn.Module]], speed: SpeedSection, *, sharded: bool) -> int:
    """Applied before checkpointing, compile and sharding; returns the number of converted layers."""
    if speed.float8 == "off":
        return 0
    chosen = {id(layer) for layer in convertible(units)}
    if not chosen:
        raise ConfigError(
            f"--speed.float8 {speed.float8}: no nn.Linear within the model's blocks has sizes that are "
            "multiples of 16.",
            "--speed.float8 off, or --model.args with such widths",
        )
    convert: Any = importlib.import_module("torchao.float8").convert_to_float8_training
    for block in blocks_of([list(unit) for unit in units]):
        convert(block, config=_recipe(speed, sharded), module_filter_fn=lambda layer, _: id(layer) in chosen)
    return len(chosen)


def _recipe(speed: SpeedSection, sharded: bool) -> Any:
    kind: Any = importlib.import_module("torchao.float8").Float8LinearConfig
    recipe = kind.from_recipe_name(speed.float8)
    gathers = sharded and speed.float8 == "tensorwise"
    return dataclasses.replace(
        recipe,
        emulate=speed.float8_emulate,
        enable_fsdp_float8_all_gather=gathers,
        # Rows of images, and of the tokens that an expert gets, are no multiple of 16: zeros are added to
        # the products that sum over them. Others are computed as they are.
        pad_inner_dim=True,
    )


class Scales:
    """After an update: computes the scales of all sharded float8 weights at once, instead of one sum over
    ranks a weight later.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._compute: Any = importlib.import_module(
            "torchao.float8"
        ).precompute_float8_dynamic_scale_for_fsdp

    def refresh(self) -> None:
        self._compute(self._root)


def maybe_scales(root: nn.Module, speed: SpeedSection, *, sharded: bool) -> Scales | None:
    return Scales(root) if sharded and speed.float8 == "tensorwise" else None


def gathered_in_float8(units: Sequence[Sequence[nn.Module]], speed: SpeedSection) -> Iterable[Tensor]:
    """Weights that are gathered in one byte an element."""
    return [layer.weight for layer in convertible(units)] if speed.float8 == "tensorwise" else []
