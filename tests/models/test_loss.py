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
from fsdp.models.checks import IGNORED
from fsdp.models.cross_entropy import TokenCounts, count_tokens, cross_entropy_parts, summed_entropy
from fsdp.models.loss import AUXILIARY, BY_SAMPLES, LossFunction
from fsdp.models.model_output import Output as Found
from fsdp.models.model_output import loss_or_logits, read_output

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
    [
        lambda x: x,
        lambda x: {"logits": x},
        lambda x: Output(x),
        lambda x: (x, None),
        lambda x: {"loss": None, "logits": x},
    ],
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
    with pytest.raises(ConfigError, match=r"no targets: they have inputs, labels\. HINT: targets, the"):
        LossFunction(model)(model, {"inputs": INPUTS, "labels": TARGETS}, VALID, 2)


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
    assert count_tokens({"targets": targets}, valid) == {"targets": TokenCounts(all=2, after_first=1)}


def test_low_precision_logits_are_summed_in_fp32_and_fp64_stays() -> None:
    targets, valid = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    assert cross_entropy_parts(torch.randn(2, 3).bfloat16(), targets, valid).loss_sum.dtype == torch.float32
    assert cross_entropy_parts(torch.randn(2, 3).double(), targets, valid).loss_sum.dtype == torch.float64


def test_a_model_gets_the_inputs_that_its_forward_names() -> None:
    class Wants(nn.Module):
        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return x * attention_mask

    model = Wants()
    data = {
        "inputs": INPUTS,
        "targets": TARGETS,
        "attention_mask": torch.ones(3, 4),
        "unknown": torch.zeros(3),
    }
    assert LossFunction(model)(model, data, VALID, 2).loss_sum.isfinite()


@pytest.mark.parametrize("output", [3, None, [], {"hidden": torch.zeros(1)}])
def test_anything_else_is_refused_by_its_type(output: Any) -> None:
    with pytest.raises(ConfigError, match=f"the model returned a {type(output).__name__}: neither"):
        loss_or_logits(output)


@pytest.mark.parametrize("output", [{"loss": 0.5, "logits": torch.ones(2, 3)}, {"logits": [torch.ones(2)]}])
def test_a_loss_or_logits_that_are_no_tensor_are_refused(output: Any) -> None:
    with pytest.raises(ConfigError, match=r"the model returned a (float as loss|list as logits)"):
        loss_or_logits(output)


def test_logits_before_the_loss_are_read_of_a_model_that_was_given_labels() -> None:
    logits, loss = torch.ones(2, 3), torch.ones(())
    assert read_output((logits, loss), labelled=True) == Found(loss, logits)
    assert read_output((logits, loss)) == read_output((logits, None), labelled=True) == Found(None, logits)


def test_inputs_come_in_the_parameters_precision() -> None:
    model = Gives(lambda x: x).double()
    assert (
        LossFunction(model)(model, {"inputs": INPUTS, "targets": TARGETS}, VALID, 2).loss_sum.dtype
        == torch.float64
    )


# ---------------------------------------------------------------- a loss of its own, and the logits it came
# from

TOKENS = torch.randint(0, 7, (3, 6), generator=torch.Generator().manual_seed(1))
LABELS = torch.where(torch.arange(6) < torch.tensor([[6], [2], [4]]), TOKENS, -100)


class Causal(nn.Module):
    """As transformers' heads are: labels in, their mean loss and the logits out."""

    def __init__(
        self, shift: bool = True, smoothing: float = 0.0, auxiliary: float = 0.0, gives_logits: bool = True
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 7)
        self.shift, self.smoothing, self.router_aux_loss_coef, self.gives_logits = (
            shift,
            smoothing,
            auxiliary,
            gives_logits,
        )
        self.losses = 0

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.table(x)
        found = {"logits": logits} if self.gives_logits else {}
        if self.router_aux_loss_coef:
            found["aux_loss"] = logits.square().mean()
        if labels is None:
            return found
        self.losses += 1
        ours, theirs = (logits[:, :-1], labels[:, 1:]) if self.shift else (logits, labels)
        loss = F.cross_entropy(ours.flatten(0, 1), theirs.flatten(), label_smoothing=self.smoothing)
        return {**found, "loss": loss + self.router_aux_loss_coef * found.get("aux_loss", torch.zeros(()))}


def learnt(model: Causal) -> tuple[LossFunction, str]:
    function = LossFunction(model)
    with torch.no_grad():
        return function, function.learn(model, {"inputs": TOKENS[:2], "labels": LABELS[:2]})


@pytest.mark.parametrize("shift", [True, False])
def test_a_mean_over_labels_is_taken_apart_into_their_sum(shift: bool) -> None:
    model = Causal(shift)
    function, said = learnt(model)
    assert (said, function.shifts, function.counts_tokens) == ("", shift, True)
    called = model.losses
    parts = function(model, {"inputs": TOKENS, "labels": LABELS}, VALID, 2)
    assert model.losses == called  # a loss that nobody takes is not computed
    kept = LABELS[:2, 1:] if shift else LABELS[:2]
    logits = model.table(TOKENS[:2, :-1] if shift else TOKENS[:2])
    expected = F.cross_entropy(logits.flatten(0, 1), kept.flatten(), reduction="sum")
    assert parts.loss_sum.item() == pytest.approx(expected.item(), rel=1e-6)
    assert function.tokens(count_tokens({"labels": LABELS}, VALID)) == int((kept != -100).sum())


def test_a_micro_batch_without_a_label_adds_nothing() -> None:
    model = Causal()
    function, _ = learnt(model)
    masked = torch.full_like(LABELS, -100)
    parts = function(model, {"inputs": TOKENS, "labels": masked}, torch.ones(3, dtype=torch.bool), 3)
    parts.loss_sum.backward()
    assert parts.loss_sum.item() == 0
    assert model.table.weight.grad is not None
    assert not model.table.weight.grad.any()


def test_an_auxiliary_loss_is_weighed_by_the_labels_beside_it() -> None:
    model = Causal(auxiliary=0.5)
    function, said = learnt(model)
    assert said == AUXILIARY
    parts = function(model, {"inputs": TOKENS, "labels": LABELS}, VALID, 2)
    output = model(TOKENS[:2], LABELS[:2])  # padding never reaches it
    # 5 and 1 labels after the first
    assert parts.loss_sum.item() == pytest.approx(6 * output["loss"].item(), rel=1e-6)


@pytest.mark.parametrize("model", [Causal(smoothing=0.1), Causal(gives_logits=False)])
def test_a_loss_that_cannot_be_weighed_by_tokens_is_said(model: Causal) -> None:
    function, said = learnt(model)
    assert said == BY_SAMPLES
    parts = function(model, {"inputs": TOKENS, "labels": LABELS}, VALID, 2)
    assert parts.loss_sum.item() == pytest.approx(2 * model(TOKENS[:2], LABELS[:2])["loss"].item(), rel=1e-6)


def test_a_loss_per_sample_needs_no_word() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            return x.mean()

    model = Own()
    assert LossFunction(model).learn(model, {"inputs": INPUTS, "targets": TARGETS}) == ""


# ---------------------------------------------------------------- compiled


def bytes_kept(summed: Any, logits: Tensor, targets: Tensor) -> int:
    """For backward, each tensor counted once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        summed(logits, targets).backward()
    return sum(kept.values())


@pytest.mark.slow
@pytest.mark.long
def test_a_compiled_cross_entropy_is_the_eager_one_and_keeps_the_logits_alone() -> None:
    compiled = LossFunction(nn.Linear(2, 2), compiled=True)._summed
    logits = torch.randn(4, 7, 50, dtype=torch.float64)
    targets = torch.randint(0, 50, (4, 7))
    targets[0, :3] = IGNORED
    found = []
    for summed in (compiled, summed_entropy):
        leaf = logits.clone().requires_grad_()
        loss = cross_entropy_parts(leaf, targets, torch.tensor([1, 1, 1, 0]).bool(), summed=summed).loss_sum
        loss.backward()
        assert leaf.grad is not None
        found.append((loss.detach(), leaf.grad))
    for ours, eager in zip(*found, strict=True):
        assert torch.allclose(ours, eager, rtol=1e-12, atol=1e-13)
    half = torch.randn(64, 1000, dtype=torch.bfloat16, requires_grad=True)
    wanted = torch.randint(0, 1000, (64,))
    assert bytes_kept(summed_entropy, half, wanted) >= 4 * half.numel()
    assert bytes_kept(compiled, half, wanted) < 2.5 * half.numel()
