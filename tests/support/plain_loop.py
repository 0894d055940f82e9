"""Training without shardrun: one process, the whole model, torch's own AdamW, or Muon. What a sharded run is
compared with.

From fsdp/ come only the initial weights and which samples a step takes; what is done with them is all here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp.config import Config
from fsdp.data import Cursor, build_dataset
from fsdp.models import build_real, resolve
from fsdp.models.lora import apply_lora, freeze
from tests.support.adapters import draw_adapters, merge

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Trained:
    parameters: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    averages: dict[str, Tensor] = field(default_factory=dict)
    """Of the parameters, with --optim.ema."""


def train_plainly(config: Config, *, dtype: str, steps: int = 20) -> Trained:
    """`dtype` is the dtype of computation; parameters are in fp32, or fp64 for fp64."""
    data = build_dataset(config.data)
    master = torch.float64 if dtype == "fp64" else torch.float32
    model = build_real(resolve(config.model, data.info.facts), config.run.seed).to(master)
    if config.model.frozen:
        freeze(model, config.model.frozen)
    if config.lora.rank:
        apply_lora(model, config.lora)
        draw_adapters(model, config.run.seed)
    optimizer: Any = _Both(model) if config.optim.name == "muon" else _adamw(model)
    average = copy.deepcopy(model) if config.optim.ema else None
    cursor = Cursor(seed=config.run.seed, samples=len(data.train), global_batch=config.train.global_batch)
    losses, norms = [], []
    for step in range(steps):
        batch = data.train.batch(cursor.indices(step))
        loss = _loss(model, batch["inputs"], batch["targets"], DTYPES[dtype])
        optimizer.zero_grad()
        loss.backward()
        largest = config.train.clip_grad_norm or float("inf")
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), largest)))
        for group in optimizer.param_groups:
            group["lr"] = _rate(config.optim.lr, step + 1, steps)
        optimizer.step()
        losses.append(float(loss.detach()))
        if average is not None:
            _move(average, model, config.optim.ema)
    return Trained(_merged(model, config), losses, norms, {} if average is None else _merged(average, config))


def _merged(model: nn.Module, config: Config) -> dict[str, Tensor]:
    if config.lora.rank:
        merge(model)
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@torch.no_grad()
def _move(average: nn.Module, model: nn.Module, decay: float) -> None:
    for a, p in zip(average.parameters(), model.parameters(), strict=True):
        a.mul_(decay).add_(p, alpha=1 - decay)


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    lower = {name: p.to(dtype) if p.dim() else p for name, p in model.named_parameters()}
    keywords = {"targets": targets} if "targets" in model.forward.__code__.co_varnames else {}
    output = torch.func.functional_call(model, lower, (inputs,), keywords)
    if output.dim() == 0:
        return output
    output = output if output.dtype == torch.float64 else output.float()
    return F.cross_entropy(output.flatten(0, -2), targets.flatten(), ignore_index=-100)


def _adamw(model: nn.Module, without: Collection[Tensor] = ()) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad and p not in without]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)


class _Both:
    """torch's Muon for the matrices of blocks, AdamW for the others."""

    def __init__(self, model: nn.Module) -> None:
        of_blocks = {p for n, p in model.named_parameters() if n.startswith("blocks.") and p.dim() == 2}
        self._muon = torch.optim.Muon(
            [p for p in model.parameters() if p in of_blocks and p.requires_grad],
            lr=1.0,
            weight_decay=0.1,
            adjust_lr_fn="match_rms_adamw",
        )
        self._adamw = _adamw(model, without=of_blocks)
        self.param_groups = self._muon.param_groups + self._adamw.param_groups

    def zero_grad(self) -> None:
        self._muon.zero_grad()
        self._adamw.zero_grad()

    def step(self) -> None:
        self._muon.step()
        self._adamw.step()


def _rate(peak: float, step: int, steps: int) -> float:
    """A twentieth of warm-up, then half a cosine down to a tenth."""
    warm = steps // 20
    if step <= warm:
        return peak * step / warm
    return peak * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2)


def relative_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """‖a − b‖ / ‖b‖ of the whole model."""
    assert ours.keys() >= theirs.keys()
    pairs = [(ours[name].double(), expected.double()) for name, expected in theirs.items()]
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    return math.sqrt(apart / max(sum(float(b.square().sum()) for _, b in pairs), 1e-60))


def worst_parameter(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest relative difference of a single parameter."""
    return max(relative_difference({name: ours[name]}, {name: expected}) for name, expected in theirs.items())
