"""Does a model fit what is asked of it: parameters that FSDP shards, indices within its embeddings, a loss of
one number.

A traceback of torch names none of them. Not here: how the loss is weighed (fsdp/models/loss.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fsdp.base.errors import ConfigError

IGNORED = -100


def check_parameters(model: nn.Module, name: str) -> None:
    """Before anything is sharded: shapes that are known and numbers that FSDP reduces."""
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ConfigError(
                f"--model.name {name}: {key} has no shape before the first forward, and is sharded before it.",
                "nn.Linear(IN, OUT) in place of nn.LazyLinear(OUT), and likewise for every lazy module",
            )
    for key, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ConfigError(
                f"--model.name {name}: parameter {key} is {str(parameter.dtype).removeprefix('torch.')}, which FSDP does "
                "not reduce.",
                "nn.Parameter(torch.view_as_real(VALUES)), and torch.view_as_complex(parameter) in forward",
            )


def make_contiguous(model: nn.Module) -> None:
    """Parameters in the order of their dimensions, as FSDP takes them; values and names stay."""
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def lacks_base(model: nn.Module) -> str | None:
    """The first orthogonal parametrization whose base matrix was not made: on the meta device torch leaves it
    out.
    """
    return next(
        (
            f"{name}.base"
            for name, module in model.named_modules()
            if type(module).__module__ == "torch.nn.utils.parametrizations"
            and getattr(module, "base", module) is None
        ),
        None,
    )


def misfit(error: Exception, model: nn.Module) -> ConfigError | None:
    """An error for people if a forward or its loss failed for indices that are out of range or targets that
    are no classes; None for other errors. About one rank: others have other samples.
    """
    found = next(_embeddings(error), None)
    targets, logits = _cross_entropy(error)
    if found is not None:
        said = _beyond(*found, model)
    elif targets is not None and logits is not None:
        said = _no_classes(targets, logits)
    else:
        return None
    if said is not None:
        said.scope = "rank"
    return said


def _beyond(embedding: nn.Embedding, ids: Tensor, model: nn.Module) -> ConfigError | None:
    low, high, size = int(ids.min()), int(ids.max()), embedding.num_embeddings
    if low >= 0 and high < size:
        return None
    name = next((name for name, module in model.named_modules() if module is embedding), "an embedding")
    return ConfigError(
        f"{name} of the model is read at {high if high >= size else low}, and has rows 0 to {size - 1}: a token id or a "
        "position of the data lies beyond it.",
        f"give the model {high + 1} rows there, or the data fewer tokens (--data.seq_len)"
        if high >= size
        else "ids are at least 0",
    )


def _no_classes(targets: Tensor, logits: Tensor) -> ConfigError | None:
    if targets.is_floating_point() or targets.is_complex():
        return ConfigError(
            f"targets are {str(targets.dtype).removeprefix('torch.')}, and cross entropy takes the numbers of classes.",
            "return targets.long() from the data, or let the model take targets and return its loss",
        )
    classes, counted = logits.shape[-1], targets[targets != IGNORED]
    if not counted.numel() or (int(counted.min()) >= 0 and int(counted.max()) < classes):
        return None
    wrong = int(counted.max()) if int(counted.max()) >= classes else int(counted.min())
    return ConfigError(
        f"a target is {wrong}, and the model has logits for classes 0 to {classes - 1} ({IGNORED} masks a target).",
        f"a model with {wrong + 1} classes" if wrong >= classes else f"targets from 0, or {IGNORED}",
    )


def check_one_number(loss: Tensor) -> None:
    """Of a micro-batch."""
    if loss.numel() != 1:
        raise ConfigError(
            f"the model's own loss has the shape {tuple(loss.shape)}, and a step takes one number.",
            "return loss.mean()",
        )


# ---------------------------------------------------------------- where it failed


def _frames(error: Exception) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _embeddings(error: Exception) -> Iterator[tuple[nn.Embedding, Tensor]]:
    for frame in _frames(error):
        owner, ids = frame.f_locals.get("self"), frame.f_locals.get("input")
        if isinstance(owner, nn.Embedding) and isinstance(ids, Tensor):
            yield owner, ids


def _cross_entropy(error: Exception) -> tuple[Tensor | None, Tensor | None]:
    """Targets and logits of torch's own function, if it was the one that failed."""
    for frame in _frames(error):
        if frame.f_code is torch.nn.functional.cross_entropy.__code__:
            inside: Mapping[str, Any] = frame.f_locals
            return inside["target"], inside["input"]
    return None, None
