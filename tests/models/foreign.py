"""Models of transformers and timm trained by the product and by a plain loop, and the difference of the two.

The plain loop takes a whole global batch at once, in float64, and shares with the product only the initial
weights and the samples.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fsdp.data import Cursor, build_dataset
from fsdp.models import build_real, resolve
from tests.support.plain_loop import relative_difference
from tests.support.runs import run, settings

STEPS, BATCH = 4, 7
FLAGS = (
    f"--train.steps {STEPS} --train.global_batch {BATCH} --train.clip_grad_norm 0 --precision.master fp64 "
    "--optim.name sgd --optim.momentum 0 --optim.schedule constant --optim.warmup_steps 0"
)
KINDS = {
    "llama": "causal", "qwen3": "causal", "gemma3": "causal", "gpt2": "causal", "mixtral": "causal",
    "qwen2_moe": "causal", "qwen3_moe": "causal", "odd_moe": "causal", "gpt_oss": "causal", "mamba": "causal",
    "bert": "masked",
    "classifier": "classes", "t5": "seq2seq", "vit": "images",
    "vision_transformer": "images", "convnext": "images", "mixer": "images",
}  # fmt: skip
"""Models of small_hf.py and small_timm.py, and what they read."""
TIMM = ("vision_transformer", "convnext", "mixer")
MESHES = {
    "1 rank": (1, ""), "2 ranks": (2, ""), "3 ranks": (3, ""),
    "hsdp 2×2": (4, "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2"),
}  # fmt: skip
RATES = {"t5": 0.005}
"""0.05 for the others."""


def build(model: str, exact: bool = False) -> nn.Module:
    """The factory of --model.name. `exact`: without the model's own casts to float32."""
    file = "small_timm" if model in TIMM else "small_hf"
    built = getattr(importlib.import_module(f"tests.models.{file}"), model)()
    if exact:
        for module in built.modules():
            kind: Any = type(module)
            module.__class__ = _without_casts(kind)
    return built


class NoCasts(TorchFunctionMode):
    """A float64 tensor stays one where the code casts it to float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = [torch.float64 if one is torch.float32 else one for one in args]
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


@functools.cache
def _without_casts(cls: Any) -> Any:
    """The class with a forward in NoCasts: each module's own, since recomputation calls blocks alone."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with NoCasts():
            return cls.forward(self, *args, **kwargs)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def words_of(model: str, data: str = "texts", *, exact: bool = False) -> str:
    kind = f"{data} --data.args.kind {KINDS[model]}" if KINDS[model] != "images" else "pictures"
    named = f"--model.name tests.models.foreign:build --model.args.model {model}"
    casts = "--model.args.exact true " if exact else ""
    return f"{named} {casts}--data.name tests.models.small_hf:{kind} --optim.lr {rate_of(model)} {FLAGS}"


def rate_of(model: str) -> float:
    return RATES.get(model, 0.05)


# ---------------------------------------------------------------- the plain loop


def plain_loss(
    model: nn.Module, batch: Mapping[str, Tensor], kind: str, pieces: list[np.ndarray]
) -> tuple[Tensor, float]:
    """The mean over the whole batch's labels, and the number reported, in which no auxiliary loss is: that of
    each piece, weighed by rows.
    """
    if kind == "images":
        output = model(batch["inputs"].double())
        loss = F.cross_entropy(output if isinstance(output, Tensor) else output.logits, batch["targets"])
        return loss, float(loss.detach())
    given = {"labels": batch["labels"]} if kind in ("seq2seq", "speech") else {}
    labels = batch["labels"][:, 1:] if kind == "causal" else batch["labels"]
    total, count, added = torch.zeros((), dtype=torch.float64), (labels != -100).sum(), 0.0
    for rows in pieces:
        given_rows = {k: v[rows] for k, v in given.items()}
        if kind == "speech":
            output = model(input_features=batch["inputs"][rows].double(), **given_rows)
        else:
            output = model(batch["inputs"][rows], attention_mask=batch["attention_mask"][rows], **given_rows)
        logits = output.logits[:, :-1] if kind == "causal" else output.logits
        total = total + F.cross_entropy(logits.flatten(0, -2), labels[rows].flatten(), reduction="sum")
        if getattr(output, "aux_loss", None) is not None:
            added = added + 0.5 * output.aux_loss * len(rows) / len(labels)
    loss = total / count
    return loss + added, float(loss.detach())


def plain(
    model: str, ranks: int, micro: int, *, exact: bool = False
) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters and losses. The cut over ranks and micro-batches matters only to an auxiliary loss."""
    cut = (ranks, micro) if "moe" in model or model in ("mixtral", "gpt_oss", "jamba", "dbrx") else (1, 1)
    return _plain(model, *cut, exact)


@functools.cache
def _plain(model: str, ranks: int, micro: int, exact: bool) -> tuple[dict[str, Tensor], list[float]]:
    config = settings(words_of(model, exact=exact))
    data = build_dataset(config.data)
    module: Any = build_real(resolve(config.model, data.info.facts), config.run.seed).double()
    if "expert" in " ".join(name for name, _ in module.named_parameters()):
        module.set_experts_implementation("eager")  # torch's grouped products have no float64
    cursor = Cursor(seed=config.run.seed, samples=len(data.train), global_batch=BATCH)
    pieces = [part for own in np.array_split(np.arange(BATCH), ranks) for part in np.array_split(own, micro)]
    losses = []
    for step in range(STEPS):
        module.zero_grad()
        loss, reported = plain_loss(module, data.train.batch(cursor.indices(step)), KINDS[model], pieces)
        loss.backward()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(rate_of(model) * parameter.grad)
        losses.append(reported)
    return {name: p.detach() for name, p in module.named_parameters()}, losses


# ---------------------------------------------------------------- the difference


def differences(
    model: str, ranks: int, micro: int, folder: Path, *words: str, exact: bool = False
) -> tuple[float, float]:
    """Of the losses, the largest of a step, and of all parameters; each relative to the plain loop's."""
    parameters, losses = plain(model, ranks, micro, exact=exact)
    share = -(-BATCH // ranks)
    cut = f"--train.micro_batch {-(-share // micro)}"
    finished = run(ranks, folder, words_of(model, exact=exact), cut, *words)
    found = [record["loss"] for record in finished.records if "grad_norm" in record]
    apart = max(abs(a / b - 1) for a, b in zip(found, losses, strict=True))
    return apart, relative_difference(finished.parameters, parameters)
