"""Builds a model with its initial weights on one device, without a process group.

Used for prediction, for comparison with a sharded run, and for rank 0's broadcast. Not here: shards
(fsdp/parallel/materialize.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fsdp.base.torch_private.core import convert_tensors
from fsdp.models.device_draw import draw_into
from fsdp.models.parameter_names import all_names
from fsdp.models.registry import ModelSpec


def build_real(spec: ModelSpec, seed: int, device: str | torch.device = "cpu") -> nn.Module:
    """Builds the model with a run's initial weights; on the host first if it has no param_inits()."""
    if not spec.knows_inits:
        return _built_whole(spec, seed).to(device)
    with torch.device("meta"):
        model = spec.build()
    to_empty(model, device)
    draw_parameters(model, seed)
    fill_buffers(model, device)
    return model


def _built_whole(spec: ModelSpec, seed: int) -> nn.Module:
    with seeded(seed), torch.device("cpu"):
        model = spec.build()
    draws = spec.draws(seed, lambda: model)
    if draws is not None:
        model.load_state_dict(draws)
    return model


def to_empty(
    model: nn.Module, device: str | torch.device, empty: Callable[[Tensor], Tensor] | None = None
) -> None:
    """As nn.Module.to_empty, but keeps tied parameters and buffers tied, which that makes separate tensors.

    `empty` allocates each tensor, if its memory is not torch's.
    """
    tied = [names for names in all_names(model).values() if len(names) > 1]
    convert_tensors(model, empty or (lambda tensor: torch.empty_like(tensor, device=device)))
    for first, *others in tied:
        owner, _, key = first.rpartition(".")
        tensor = getattr(model.get_submodule(owner), key)
        for other in others:
            owner, _, key = other.rpartition(".")
            if getattr(model.get_submodule(owner), key) is not tensor:
                setattr(model.get_submodule(owner), key, tensor)


def persistent(model: nn.Module) -> list[str]:
    """Returns the names of the parameters and buffers in the state dict."""
    kept = model.state_dict().keys()
    return [name for name, _ in [*model.named_parameters(), *model.named_buffers()] if name in kept]


def draw_parameters(model: nn.Module, seed: int) -> None:
    """Draws each whole parameter by its first name in named_parameters(): tied ones are drawn once."""
    inits: dict[str, Any] = model.param_inits()  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        draw_into(parameter, inits[name], seed, name)


def fill_buffers(model: nn.Module, device: str | torch.device) -> None:
    if hasattr(model, "init_buffers"):
        model.init_buffers(torch.device(device))  # type: ignore[operator]


def seed_streams(seed: int, device: torch.device) -> None:
    """As torch.manual_seed, for this device only. If CUDA is not initialised, that keeps a stack trace per
    call: a fifth of a millisecond a step. The streams of Python and numpy too, from which a forward may draw
    (SpecAugment of transformers).
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context manager that seeds the host's random streams, and restores them afterwards."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)
