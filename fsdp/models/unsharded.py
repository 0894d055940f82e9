"""A model with its initial weights on one device and no process group.

For prediction, for comparison with a sharded run, and as what rank 0 sends. Not here: shards
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

from fsdp.base.torch_private.tensors import convert_tensors
from fsdp.models.init import draw_into
from fsdp.models.parameter_names import all_names
from fsdp.models.registry import ModelSpec


def build_real(spec: ModelSpec, seed: int, device: str | torch.device = "cpu") -> nn.Module:
    """The weights that a run with this seed starts from. A model that says no inits is built on the host and
    moved.
    """
    if not spec.knows_inits:
        with seeded(seed), torch.device("cpu"):
            return spec.build().to(device)
    with torch.device("meta"):
        model = spec.build()
    to_empty(model, device)
    draw_parameters(model, seed)
    fill_buffers(model, device)
    return model


def to_empty(
    model: nn.Module, device: str | torch.device, empty: Callable[[Tensor], Tensor] | None = None
) -> None:
    """nn.Module.to_empty, but tied parameters and buffers stay tied: leaving meta, it makes each use a tensor
    of its own.

    `empty` makes each tensor's memory where it is to lie elsewhere than torch would put it.
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
    """The names of the parameters and buffers that a state dict holds."""
    kept = model.state_dict().keys()
    return [name for name, _ in [*model.named_parameters(), *model.named_buffers()] if name in kept]


def draw_parameters(model: nn.Module, seed: int) -> None:
    """Each whole parameter by the name that named_parameters() gives it first: tied ones are drawn once."""
    inits: dict[str, Any] = model.param_inits()  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        draw_into(parameter, inits[name], seed, name)


def fill_buffers(model: nn.Module, device: str | torch.device) -> None:
    if hasattr(model, "init_buffers"):
        model.init_buffers(torch.device(device))  # type: ignore[operator]


def seed_streams(seed: int, device: torch.device) -> None:
    """As torch.manual_seed does for this device. That one, where CUDA is not used, keeps a stack trace for
    each call: a fifth of a millisecond a step.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The host's random streams start from the seed within it, and go on as they were after it."""
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
