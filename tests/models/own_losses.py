"""Ten models that return a loss of their own, and texts with masked targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

WORDS, WIDTH = 31, 10


def _entropy(logits: Tensor, labels: Tensor, **more: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **more)


def _weighted(model: Words, logits: Tensor, labels: Tensor) -> Tensor:
    weights = torch.linspace(1, 9, WORDS, dtype=logits.dtype)
    return _entropy(logits, labels, weight=weights)


def _focal(model: Words, logits: Tensor, labels: Tensor) -> Tensor:
    losses = _entropy(logits, labels, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).sum() / (labels != -100).sum()


def _compared(model: Words, logits: Tensor, labels: Tensor) -> Tensor:
    rows = logits.mean(1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


LOSSES: dict[str, Callable[[Words, Tensor, Tensor], Tensor]] = {
    "class weights": _weighted,
    "a term in training": lambda m, x, y: _entropy(x, y) + (0.5 * x.square().mean() if m.training else 0.0),
    "smoothing in training": lambda m, x, y: _entropy(x, y, label_smoothing=0.1 if m.training else 0.0),
    "zero ignored": lambda m, x, y: _entropy(x, y.clamp(min=0), ignore_index=0),
    "a small term": lambda m, x, y: _entropy(x, y) + 1e-6 * m.head.weight.square().sum(),
    "sum": lambda m, x, y: _entropy(x, y, reduction="sum"),
    "focal": _focal,
    "loss alone": lambda m, x, y: _entropy(x, y, label_smoothing=0.1),
    "rows compared": _compared,
    "num_items_in_batch": lambda m, x, y: _entropy(x, y, reduction="sum"),
}
ALONE = ("loss alone", "rows compared")
"""Returned without logits."""


class Words(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head: nn.Linear = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, labels: Tensor | None = None) -> Any:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        given = labels if targets is None else targets
        if given is None:
            return logits
        loss = LOSSES[self.kind](self, logits, given)
        return loss if self.kind in ALONE else {"loss": loss, "logits": logits}


class Divided(Words):
    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        found = super().forward(tokens, targets, labels)
        return found | {"loss": found["loss"] / num_items_in_batch}


def build(kind: str) -> nn.Module:
    kind = kind.replace("_", " ") if kind != "num_items_in_batch" else kind
    return (Divided if kind == "num_items_in_batch" else Words)(kind)


class Masked(Dataset[dict[str, Tensor]]):
    """Nine tokens; the later a row, the more of its first labels are masked. The first rows mask none."""

    def __init__(self, count: int, name: str) -> None:
        tokens = torch.randint(0, WORDS, (count, 10), generator=torch.Generator().manual_seed(6))
        self.inputs, self.labels, self.name = tokens[:, :-1], tokens[:, 1:].clone(), name
        for row in range(count):
            self.labels[row, : row % 8] = -100

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], self.name: self.labels[index]}


def masked(name: str, count: int = 16) -> tuple[Masked, Masked]:
    return Masked(count, name), Masked(9, name)
