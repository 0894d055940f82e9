"""LoRA: a frozen linear layer W with a trained product of two thin matrices, y = W x + (α/r)·B A x.

The adapters are two more parameters of the layer itself, so no name of the model changes and they are in the
communication group of their block. They are drawn from their own streams: the base is drawn as without them.
Not here: checkpoints of adapters alone (fsdp/checkpoint/adapter_weights.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.config import LoraSection
from fsdp.models.blocks import blocks_of, find_units
from fsdp.models.init import Constant, Init, Uniform, draw_into
from fsdp.models.parameter_names import names_by_tensor
from fsdp.models.trainable import matching, patterns

A, B = "lora_a", "lora_b"


class LoraLinear(nn.Linear):
    """A layer that `apply_lora` makes from an nn.Linear of a model, in place."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float
    lora_dropout: float

    def forward(self, input: Tensor) -> Tensor:
        thin = F.linear(F.dropout(input, self.lora_dropout, self.training), self.lora_a)
        return F.linear(input, self.weight, self.bias) + F.linear(thin, self.lora_b) * self.lora_scale

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={len(self.lora_a)}"


def apply_lora(model: nn.Module, section: LoraSection) -> list[str]:
    """Adds adapters to the layers of --lora.targets and freezes the rest. Returns the layers' names."""
    chosen = _targets(model, section)
    _keep_inits(model)
    model.requires_grad_(False)
    for layer in chosen.values():
        _adapt(layer, section)
    return list(chosen)


def _adapt(layer: nn.Linear, section: LoraSection) -> None:
    about: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    layer.__class__ = LoraLinear
    assert isinstance(layer, LoraLinear)
    layer.lora_a = nn.Parameter(torch.empty(section.rank, layer.in_features, **about))
    layer.lora_b = nn.Parameter(torch.empty(layer.out_features, section.rank, **about))
    layer.lora_scale, layer.lora_dropout = section.scale, section.dropout


def _keep_inits(model: nn.Module) -> None:
    """Keeps the model's param_inits() as it is before the adapters, which it does not know, are added."""
    owner: Any = model
    if callable(getattr(owner, "param_inits", None)):
        known = owner.param_inits()
        owner.param_inits = lambda: known


def _targets(model: nn.Module, section: LoraSection) -> dict[str, nn.Linear]:
    """Selects layers of class nn.Linear itself: a subclass may never be called (nn.MultiheadAttention reads
    out_proj's weight).
    """
    # Layers that have adapters already are not targets.
    layers = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and name}
    shared = _shared(model)
    if not patterns(section.targets):
        return _inner(model, {name: m for name, m in layers.items() if m.weight not in shared}, section)
    wanted = [_form(pattern, layers) for pattern in patterns(section.targets)]
    chosen = matching(wanted, list(layers), "--lora.targets", "linear layer")
    for name in chosen:
        if layers[name].weight in shared:
            raise ConfigError(
                f"--lora.targets matches {name}, whose weight is tied to another layer's: "
                "a merge would change both.",
                "leave it out of --lora.targets",
            )
    return {name: layers[name] for name in chosen}


def _form(pattern: str, names: Mapping[str, object]) -> str:
    """Expands a bare name: `q_proj` selects every layer of that name."""
    last = f"*.{pattern}"
    whole = any(fnmatchcase(name, pattern) for name in names)
    return last if not whole and any(fnmatchcase(name, last) for name in names) else pattern


def _shared(model: nn.Module) -> set[Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return {parameter for parameter, names in names_by_tensor(named).items() if len(names) > 1}


def _inner(model: nn.Module, layers: dict[str, nn.Linear], section: LoraSection) -> dict[str, nn.Linear]:
    """Returns the default targets: the layers within the model's blocks, or all layers if it has none."""
    inside = {module for block in blocks_of(find_units(model)) for module in block.modules()}
    chosen = {name: layer for name, layer in layers.items() if layer in inside} or layers
    if not chosen:
        raise ConfigError(
            f"--lora.rank {section.rank}: this model has no nn.Linear layer for an adapter.",
            "--lora.rank 0, or --model.frozen",
        )
    return chosen


# ---------------------------------------------------------------- models with adapters


def adapted(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLinear))


def lora_inits(model: nn.Module) -> dict[str, Init]:
    """B is zero: adapters do not change the initial model."""
    inits: dict[str, Init] = {}
    for name, layer in adapted(model):
        inits[f"{name}.{A}"] = Uniform(1 / math.sqrt(layer.in_features))
        inits[f"{name}.{B}"] = Constant(0.0)
    return inits


def draw_adapters(model: nn.Module, seed: int) -> None:
    """Draws the adapters of a whole model in one process."""
    parameters = dict(model.named_parameters())
    for name, init in lora_inits(model).items():
        draw_into(parameters[name], init, seed, name)


def base_names(model: nn.Module) -> set[str]:
    """Returns all names of the parameters that a checkpoint of adapters omits; empty without adapters."""
    if next(adapted(model), None) is None:
        return set()
    return {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Returns the weight equal to base plus adapter; the product is computed in at least fp32."""
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return (weight.to(wide) + (b.to(wide) @ a.to(wide)) * scale).to(weight.dtype)


def merge(model: nn.Module) -> None:
    """Merges the adapters into plain linear layers, in place, in one process."""
    for _, layer in list(adapted(model)):
        with torch.no_grad():
            layer.weight.copy_(merged(layer.weight, layer.lora_a, layer.lora_b, layer.lora_scale))
        del layer.lora_a, layer.lora_b
        layer.__class__ = nn.Linear  # type: ignore[assignment]
