"""How a model is called and what it returns is weighed: logits, a loss of its own, masked tokens, padded rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp.loss import LossFunction, count_tokens, cross_entropy_parts, loss_or_logits

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
    "make",
    [lambda x: x, lambda x: {"logits": x}, lambda x: Output(x), lambda x: (x, None), lambda x: {"loss": None, "logits": x}],
)
def test_logits_in_any_wrapping_are_taken(make: Any) -> None:
    model = Gives(make)
    parts = LossFunction(model)(model, {"inputs": INPUTS, "targets": TARGETS}, VALID, 2)
    expected = F.cross_entropy(model.linear(INPUTS[:2]), TARGETS[:2], reduction="sum")
    assert parts.loss_sum.item() == pytest.approx(expected.item(), rel=1e-6)
    assert parts.correct is None  # nobody asks for it in training
    with torch.no_grad():
        assert LossFunction(model)(model, {"inputs": INPUTS, "targets": TARGETS}, VALID, 2).correct is not None


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


def test_a_micro_batch_of_padding_alone_adds_nothing() -> None:
    model = Gives(lambda x: x)
    function = LossFunction(model)
    function(model, {"inputs": INPUTS, "targets": TARGETS}, torch.ones(3, dtype=torch.bool), 3)
    parts = function(model, {"inputs": INPUTS, "targets": TARGETS}, torch.zeros(3, dtype=torch.bool), 0)
    parts.loss_sum.backward()
    assert parts.loss_sum.item() == 0
    assert model.linear.weight.grad is not None
    assert not model.linear.weight.grad.any()


def test_masked_tokens_count_nowhere() -> None:
    logits, targets = torch.randn(2, 3, 7), torch.tensor([[1, -100, 2], [-100, 4, 5]])
    valid = torch.tensor([True, False])
    parts = cross_entropy_parts(logits, targets, valid)
    expected = F.cross_entropy(logits[0, [0, 2]], targets[0, [0, 2]], reduction="sum")
    assert parts.loss_sum.item() == pytest.approx(expected.item(), rel=1e-6)
    assert count_tokens({"targets": targets}, valid) == 2


def test_low_precision_logits_are_summed_in_fp32_and_fp64_stays() -> None:
    targets, valid = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    assert cross_entropy_parts(torch.randn(2, 3).bfloat16(), targets, valid).loss_sum.dtype == torch.float32
    assert cross_entropy_parts(torch.randn(2, 3).double(), targets, valid).loss_sum.dtype == torch.float64


def test_a_model_gets_the_inputs_that_its_forward_names() -> None:
    class Wants(nn.Module):
        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return x * attention_mask

    model = Wants()
    data = {"inputs": INPUTS, "targets": TARGETS, "attention_mask": torch.ones(3, 4), "unknown": torch.zeros(3)}
    assert LossFunction(model)(model, data, VALID, 2).loss_sum.isfinite()


@pytest.mark.parametrize("output", [3, None, [], {"hidden": torch.zeros(1)}])
def test_anything_else_is_refused_by_its_type(output: Any) -> None:
    with pytest.raises(TypeError, match=f"the model returned {type(output).__name__}: neither"):
        loss_or_logits(output)


def test_inputs_come_in_the_parameters_precision() -> None:
    model = Gives(lambda x: x).double()
    assert LossFunction(model)(model, {"inputs": INPUTS, "targets": TARGETS}, VALID, 2).loss_sum.dtype == torch.float64
