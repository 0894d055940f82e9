"""LoRA: a frozen linear layer W with a trained product of two thin matrices, y = W x + (α/r)·B A x.

A linear layer is an nn.Linear, or transformers' Conv1D (GPT-2), which stores W transposed. The adapters are
two more parameters of the layer itself, so no name of the model changes and they are in the communication
group of their block. They are drawn from their own streams: the base is drawn as without them. Not here:
checkpoints of adapters alone (fsdp/checkpoint/pretrained.py).

And --model.frozen: parameters selected by name patterns and frozen.
"""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.base.text import nearest
from fsdp.config import LoraSection
from fsdp.models.init import Constant, Init, Uniform
from fsdp.models.units import blocks_of, find_units, names_by_tensor

A, B = "lora_a", "lora_b"
FROZEN = "--model.frozen"


class LoraLayer(nn.Module):
    """A layer that `apply_lora` makes from a linear layer of a model, in place."""

    weight: Tensor
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float
    lora_dropout: float
    lora_over: type[nn.Module]
    """The class of the layer without adapters."""

    def forward(self, input: Tensor) -> Tensor:
        thin = F.linear(F.dropout(input, self.lora_dropout, self.training), self.lora_a)
        whole: Tensor = super().forward(input)  # type: ignore[misc]
        return whole + F.linear(thin, self.lora_b) * self.lora_scale


def is_linear(module: nn.Module) -> bool:
    """Whether a layer may have an adapter: nn.Linear itself, or Conv1D. A subclass may never be called
    (nn.MultiheadAttention reads out_proj's weight).
    """
    return type(module) is nn.Linear or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a layer is transformers' Conv1D, whose weight has a row for each input."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


@functools.cache
def _with_adapter(kind: Any) -> Any:
    """The class of a layer with adapters: its base stays, by which transformers recognises its layer."""
    return type(f"Lora{kind.__name__}", (LoraLayer, kind), {"lora_over": kind})


def apply_lora(model: nn.Module, section: LoraSection) -> list[str]:
    """Adds adapters to the layers of --lora.targets and freezes the rest. Returns the layers' names."""
    chosen = _targets(model, section)
    _keep_inits(model)
    model.requires_grad_(False)
    for layer in chosen.values():
        _adapt(layer, section)
    return list(chosen)


def _adapt(layer: Any, section: LoraSection) -> None:
    about: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    outputs, inputs = reversed(layer.weight.shape) if is_transposed(layer) else layer.weight.shape
    kind: Any = type(layer)
    layer.__class__ = _with_adapter(kind)
    layer.lora_a = nn.Parameter(torch.empty(section.rank, inputs, **about))
    layer.lora_b = nn.Parameter(torch.empty(outputs, section.rank, **about))
    layer.lora_scale, layer.lora_dropout = section.scale, section.dropout


def _keep_inits(model: nn.Module) -> None:
    """Keeps the model's param_inits() as it is before the adapters, which it does not know, are added."""
    owner: Any = model
    if callable(getattr(owner, "param_inits", None)):
        known = owner.param_inits()
        owner.param_inits = lambda: known


def _targets(model: nn.Module, section: LoraSection) -> dict[str, nn.Module]:
    """By default the layers within the model's blocks, or all layers if it has none."""
    # Layers that have adapters already are not targets, and a merge of a tied weight would change two.
    named = names_by_tensor(model.named_parameters(remove_duplicate=False))
    layers: dict[str, Any] = {
        name: layer
        for name, layer in model.named_modules()
        if name and is_linear(layer) and len(named[layer.weight]) == 1  # type: ignore[index]
    }
    # A bare name selects every layer of that name.
    wanted = [
        f"*.{pattern}" if fnmatch.filter(layers, f"*.{pattern}") and pattern not in layers else pattern
        for pattern in patterns(section.targets)
    ]
    if wanted:
        kind = "untied linear layer (nn.Linear, Conv1D)"
        return {name: layers[name] for name in matching(wanted, list(layers), "--lora.targets", kind)}
    inside = {module for block in blocks_of(find_units(model)) for module in block.modules()}
    chosen = {name: layer for name, layer in layers.items() if layer in inside} or layers
    if not chosen:
        fault = f"--lora.rank {section.rank}: this model has no linear layer (nn.Linear, Conv1D)."
        raise ConfigError(fault, "--lora.rank 0, or --model.frozen")
    return chosen


# ---------------------------------------------------------------- models with adapters


def adapted(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


def lora_inits(model: nn.Module) -> dict[str, Init]:
    """B is zero: adapters do not change the initial model."""
    inits: dict[str, Init] = {}
    for name, layer in adapted(model):
        inits[f"{name}.{A}"] = Uniform(1 / math.sqrt(layer.lora_a.shape[1]))
        inits[f"{name}.{B}"] = Constant(0.0)
    return inits


def base_names(model: nn.Module) -> set[str]:
    """Returns all names of the parameters that a checkpoint of adapters omits; empty without adapters."""
    if next(adapted(model), None) is None:
        return set()
    return {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float, *, transposed: bool) -> Tensor:
    """Returns the weight equal to base plus adapter; the product is computed in at least fp32."""
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    product = (b.to(wide) @ a.to(wide)) * scale
    return (weight.to(wide) + (product.T if transposed else product)).to(weight.dtype)


# ---------------------------------------------------------------- name patterns and frozen parameters


def patterns(text: str) -> list[str]:
    """Splits `a.*, b` into patterns, in their order."""
    return [part.strip() for part in text.split(",") if part.strip()]


def matching(wanted: Sequence[str], names: Sequence[str], flag: str, kind: str) -> list[str]:
    """Returns the names that match a pattern, in the model's order; a pattern without a match is an error
    with similar names as its hint.
    """
    for pattern in wanted:
        if not fnmatch.filter(names, pattern):
            wider = [wide for wide in (f"{pattern}.*", f"*.{pattern}") if fnmatch.filter(names, wide)]
            hint = nearest(pattern, wider or names, f"{flag} {{}}", f"leave {flag} out", cutoff=0.3)
            raise ConfigError(f"{flag} {pattern} matches no {kind} of this model (of {len(names)}).", hint)
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in wanted)]


def freeze(model: nn.Module, text: str) -> list[str]:
    """Freezes the parameters whose names match, and returns the names. A tied parameter matches by any of its
    names.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    frozen = matching(patterns(text), list(named), FROZEN, "parameter")
    for name in frozen:
        named[name].requires_grad_(False)
    return frozen
