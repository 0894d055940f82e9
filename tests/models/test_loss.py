"""How a model is called and what it returns is weighed: logits, a loss of its own, masked tokens, padded
rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.models.loss import LossFunction, count_tokens, cross_entropy_parts, summed_entropy

VALID = torch.tensor([True, True, False])
INPUTS, TARGETS = torch.randn(3, 4), torch.tensor([1, 0, 2])


class Gives(nn.Module):
    """Whatever `make` makes of the logits."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.linear(x))


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


@pytest.mark.parametrize(
    "make", [lambda x: x, lambda x: {"logits": x}, lambda x: Output(x), lambda x: (x, None)]
)
def test_logits_in_any_wrapping_are_taken(make: Any) -> None:
    model = Gives(make)
    parts = LossFunction(model)(model, {"inputs": INPUTS, "targets": TARGETS}, VALID, 2)
    expected = F.cross_entropy(model.linear(INPUTS[:2]), TARGETS[:2], reduction="sum")
    assert parts.loss_sum.item() == pytest.approx(expected.item(), rel=1e-6)
    assert parts.correct is None  # nobody asks for it in training
    with torch.no_grad():
        assert (
            LossFunction(model)(model, {"inputs": INPUTS, "targets": TARGETS}, VALID, 2).correct is not None
        )


def test_a_loss_of_its_own_is_weighed_by_the_rows_that_count() -> None:
    seen = []

    class Own(nn.Module):
        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            seen.append(len(x))
            return x.mean()

    model = Own()
    parts = LossFunction(model)(model, {"inputs": INPUTS, "targets": TARGETS}, VALID, 2)
    assert seen == [2]  # padding never reaches it
    assert parts.loss_sum.item() == pytest.approx(2 * INPUTS[:2].mean().item())
    assert parts.correct is None


def test_data_without_targets_are_named() -> None:
    """As the input_ids and labels of a data set of transformers, for a model that takes no labels."""
    model = Gives(lambda logits: logits)
    with pytest.raises(ConfigError, match=r"no targets, but inputs, labels\. HINT: targets in"):
        LossFunction(model)(model, {"inputs": INPUTS, "labels": TARGETS}, VALID, 2)


# ---------------------------------------------------------------- a loss of its own, and the logits it came
# from

TOKENS = torch.randint(0, 7, (3, 6), generator=torch.Generator().manual_seed(1))
LABELS = torch.where(torch.arange(6) < torch.tensor([[6], [2], [4]]), TOKENS, -100)


class Own(nn.Module):
    """As a model of one's own: labels in, their mean loss, and the logits if asked."""

    def __init__(self, gives_logits: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 7)
        self.gives_logits = gives_logits

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.table(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        return {"loss": loss, "logits": logits} if self.gives_logits else {"loss": loss}


@pytest.mark.parametrize(("gives_logits", "weight"), [(True, 8), (False, 2)])
def test_a_loss_of_the_model_s_own_is_weighed_by_labels_beside_logits_else_by_rows(
    gives_logits: bool, weight: int
) -> None:
    model = Own(gives_logits)
    function = LossFunction(model)
    parts = function(model, {"inputs": TOKENS, "labels": LABELS}, VALID, 2)
    assert parts.loss_sum.item() == pytest.approx(weight * model(TOKENS[:2], LABELS[:2])["loss"].item())
    assert function.counts_tokens is gives_logits
    assert function.tokens(count_tokens({"labels": LABELS}, VALID)) == 8
    assert f"weighed by {'labels' if gives_logits else 'rows'}. One that compares rows" in function.objective


def test_a_micro_batch_without_a_label_adds_nothing() -> None:
    model = Own()
    masked = torch.full_like(LABELS, -100)
    data = {"inputs": TOKENS, "labels": masked}
    parts = LossFunction(model)(model, data, torch.ones(3, dtype=torch.bool), 3)
    parts.loss_sum.backward()
    assert parts.loss_sum.item() == 0
    assert model.table.weight.grad is not None
    assert not model.table.weight.grad.any()


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 7)

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        logits = self.table(x).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch


def test_num_items_in_batch_is_that_of_the_global_batch() -> None:
    model = Summed()
    function = LossFunction(model)
    data = {"inputs": TOKENS, "labels": LABELS}
    parts = function(model, data, VALID, 2, lambda: 20.0)
    kept = LABELS[:2].flatten()
    summed = F.cross_entropy(model.table(TOKENS[:2]).flatten(0, 1), kept, reduction="sum")
    assert parts.loss_sum.item() / 20 == pytest.approx(summed.item() / 20)
    with torch.no_grad():  # an evaluation has no global batch
        assert function(model, data, VALID, 2).loss_sum.item() == pytest.approx(summed.item())


# ---------------------------------------------------------------- where the classes are


@pytest.mark.parametrize("sizes", [(5, 4, 6), (5, 4, 5), (6, 4, 6), (4, 4, 4)])
def test_pictures_have_their_classes_in_dimension_1_as_in_torch(sizes: tuple[int, int, int]) -> None:
    classes, height, width = sizes
    logits = torch.randn(2, classes, height, width)
    targets = torch.randint(0, classes, (2, height, width))
    targets[0, 0, 0] = -100
    valid = torch.ones(2, dtype=torch.bool)
    parts = cross_entropy_parts(logits, targets, valid, summed_entropy, False, 0.0)
    expected = F.cross_entropy(logits, targets, reduction="sum")
    assert parts.loss_sum.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda x: x[:, 0], r"logits of the shape \(2,\) for targets of \(2,\)"),
        (lambda x: x.mean()[None], r"logits of the shape \(1,\)"),
        (lambda x: {"loss": x[:, 0]}, r"the shape \(2,\), not that of one number"),
        (lambda x: {"loss": 3.0}, "without a tensor as loss"),
        (lambda x: {"loss": x.mean()[None]}, r"the shape \(1,\), not that of one number"),
        (lambda x: x[:, :, None, None].expand(-1, -1, 3, 3), r"logits of the shape \(2, 5, 3, 3\)"),
    ],
)
def test_what_is_neither_logits_nor_one_number_is_refused_in_a_line(make: Any, said: str) -> None:
    model = Gives(make)
    with pytest.raises(ConfigError, match=said):
        LossFunction(model)(model, {"inputs": INPUTS, "targets": TARGETS}, VALID, 2)


# ---------------------------------------------------------------- compiled
