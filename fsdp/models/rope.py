"""Frequencies of rotary positions: plain, or scaled for longer sequences as linear, llama3 or yarn.

The formulas are those of the publications, in float64. Not here: tables and rotation (transformer.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp.base.errors import ConfigError
from fsdp.models.builtin import size

SCALINGS = ("linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RopeSizes:
    """What the frequencies depend on: a part of the decoder's sizes."""

    head_dim: int = size(0, low=0)
    rope_theta: float = size(10_000.0)
    rope_scaling: str = ""
    rope_factor: float = size(1.0)
    rope_original_len: int = size(0, low=0)
    """Longest sequence before scaling."""
    rope_low_freq: float = size(1.0, low=0)
    rope_high_freq: float = size(4.0, low=0)
    rope_beta_fast: float = size(32.0)
    rope_beta_slow: float = size(1.0, low=0)
    rope_attention: float = size(0.0, low=0)
    """yarn's factor of cosines and sines; 0: from rope_factor."""


def check_scaling(scaling: str, original_len: int) -> None:
    if scaling not in ("", *SCALINGS):
        raise ConfigError(
            f"--model.args.rope_scaling {scaling} is not one of {', '.join(SCALINGS)}.",
            "--model.args.rope_scaling llama3",
        )
    if scaling in ("llama3", "yarn") and not original_len:
        raise ConfigError(
            f"--model.args.rope_scaling {scaling} needs the sequence length before scaling.",
            "--model.args.rope_original_len 8192",
        )


def frequencies(sizes: RopeSizes) -> tuple[Tensor, float]:
    """The angle a position for each pair of a head, and the factor of cosines and sines."""
    half = sizes.head_dim // 2
    plain = sizes.rope_theta ** -(torch.arange(half, dtype=torch.float64, device="cpu") / half)
    if sizes.rope_scaling == "linear":
        return plain / sizes.rope_factor, 1.0
    if sizes.rope_scaling == "llama3":
        return _llama3(plain, sizes), 1.0
    if sizes.rope_scaling == "yarn":
        return _yarn(plain, sizes), sizes.rope_attention or yarn_attention(sizes.rope_factor)
    return plain, 1.0


def yarn_attention(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def _llama3(plain: Tensor, sizes: RopeSizes) -> Tensor:
    """Pairs that turn often in the original length stay, those that turn rarely are slowed by the factor."""
    turns = sizes.rope_original_len * plain / (2 * math.pi)
    kept = (turns - sizes.rope_low_freq) / (sizes.rope_high_freq - sizes.rope_low_freq)
    return _mixed(plain, sizes.rope_factor, kept.clamp(0, 1))


def _yarn(plain: Tensor, sizes: RopeSizes) -> Tensor:
    """As llama3, with a ramp over the index of the pair."""

    def pair_with(turns: float) -> float:
        ratio = sizes.rope_original_len / (2 * math.pi * turns)
        return sizes.head_dim * math.log(ratio) / (2 * math.log(sizes.rope_theta))

    first = max(math.floor(pair_with(sizes.rope_beta_fast)), 0)
    last = min(math.ceil(pair_with(sizes.rope_beta_slow)), sizes.head_dim - 1)
    ramp = (torch.arange(len(plain), dtype=torch.float64) - first) / (last - first or 1e-3)
    return _mixed(plain, sizes.rope_factor, 1 - ramp.clamp(0, 1))


def _mixed(plain: Tensor, factor: float, kept: Tensor) -> Tensor:
    return plain / factor * (1 - kept) + plain * kept
