"""Settings of a model of transformers that a run changes: the kernel of its experts, key-value caches.

transformers is not imported: a model is any module with `set_experts_implementation`, a configuration what a
module has as `config`. Not here: the choice of --model.args.experts_implementation (hf.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

log = logging.getLogger(__name__)

GROUPED, LOOP = "grouped_mm", "eager"
ALIGNMENT = 16
"""Bytes: each row of a grouped product's operands, and of their gradients, is a multiple of them."""


def text_config(model: nn.Module) -> Any:
    """The configuration of a model, of several parts that of its decoder of text; None without one."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


# ---------------------------------------------------------------- experts


def select_experts_kernel(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces grouped products, transformers' default, where they cannot be computed in `dtype`:
    torch.nn.functional.grouped_mm takes float32, bfloat16 and float16, and rows of multiples of 16 bytes.
    """
    grouped = list(_stacked_weights(model, GROUPED))
    unaligned = [entry for entry in grouped if _is_unaligned(entry[1], dtype)]
    if not grouped or not (unaligned or dtype == torch.float64):
        return
    _select(model, LOOP)
    if unaligned and dtype != torch.float64:
        name, weight = unaligned[0]
        log.info(
            "experts are computed one after another: %s is %s, and torch's grouped products in %s need "
            "multiples of %d",
            name,
            " × ".join(map(str, weight.shape)),
            str(dtype).removeprefix("torch."),
            ALIGNMENT // dtype.itemsize,
        )


def group_experts(model: nn.Module) -> None:
    """Grouped products in place of the loop, which reads how many tokens an expert has, for fake tensors."""
    if any(_stacked_weights(model, LOOP)):
        _select(model, GROUPED)


def _select(model: nn.Module, kernel: str) -> None:
    for module in model.modules():
        select: Any = getattr(module, "set_experts_implementation", None)
        if callable(select):
            select(kernel)


def _stacked_weights(model: nn.Module, kernel: str) -> Iterator[tuple[str, nn.Parameter]]:
    """The stacked matrices of experts that are multiplied by this kernel. A model of several parts has a
    configuration for each.
    """
    for path, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        if hasattr(module, "num_experts") and getattr(config, "_experts_implementation", None) == kernel:
            for name, parameter in module.named_parameters(path, recurse=False):
                if parameter.dim() == 3:
                    yield name, parameter


def _is_unaligned(weight: nn.Parameter, dtype: torch.dtype) -> bool:
    return any(size * dtype.itemsize % ALIGNMENT for size in weight.shape[1:])


# ---------------------------------------------------------------- key-value caches


def turn_caches_off(model: nn.Module) -> None:
    """Sets `use_cache` to False in every module's configuration.

    Recomputation calls a block twice: with a cache the second call would append the same keys again.
    """
    for module in model.modules():  # an encoder and a decoder have copies
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
