"""Adapters of a whole model in one process: drawn, and merged into plain linear layers."""

from __future__ import annotations

import torch
from torch import nn

from fsdp.models.init import draw_into
from fsdp.models.lora import adapted, is_transposed, lora_inits, merged


def draw_adapters(model: nn.Module, seed: int) -> None:
    """Draws the adapters of a whole model in one process."""
    parameters = dict(model.named_parameters())
    for name, init in lora_inits(model).items():
        draw_into(parameters[name], init, seed, name)


def merge(model: nn.Module) -> None:
    """Merges the adapters into plain linear layers, in place, in one process."""
    for _, layer in list(adapted(model)):
        a, b, scale = layer.lora_a, layer.lora_b, layer.lora_scale
        del layer.lora_a, layer.lora_b
        layer.__class__ = layer.lora_over  # type: ignore[assignment]
        with torch.no_grad():
            layer.weight.copy_(merged(layer.weight, a, b, scale, transposed=is_transposed(layer)))
