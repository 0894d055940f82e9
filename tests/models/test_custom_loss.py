"""--train.loss: each sample or token counts the same on any mesh; what cannot be weighed is refused."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp.data import build_dataset
from fsdp.models.loss import LossFunction
from fsdp.models.registry import load_loss
from tests.support import plain_loop
from tests.support.plain_loop import Trained, relative_difference, train_plainly
from tests.support.runs import failures, run, settings
from tests.support.user_code import Uneven

OWN = "tests.models.test_custom_loss:"
FP64 = "--precision.master fp64 --precision.param fp64"
WORDS = (
    f"{FP64} --train.steps 6 --data.name tests.support.user_code:sentences "
    f"--model.name tests.support.user_code:TiedWords --train.loss {OWN}smoothed"
)
Batch = dict[str, Tensor]


def smoothed(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Tokens that the data mask count nothing, others 1 to 3 times."""
    targets = batch["targets"]
    losses = F.cross_entropy(output.transpose(1, 2), targets, reduction="none", label_smoothing=0.1)
    return losses, (targets != -100) * (1 + targets % 3)


def squared(output: Tensor, batch: Batch) -> Tensor:
    return (output - F.one_hot(batch["targets"], 5)).square().mean(-1)


def infinite_where_masked(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    kept = batch["targets"] > 0
    return torch.where(kept, squared(output, batch), torch.inf), kept


def mean(output: Tensor, batch: Batch) -> Tensor:
    return squared(output, batch).mean()


def other_rows(output: Tensor, batch: Batch) -> Tensor:
    return squared(output, batch)[:1]


def other_weights(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return squared(output, batch), torch.ones(1, 3)


def words(output: Tensor, batch: Batch) -> str:
    return "large"


def detached(output: Tensor, batch: Batch) -> Tensor:
    return squared(output, batch).detach()


def misspelt(output: Tensor, batch: Batch) -> Tensor:
    return batch["target"]


@functools.cache
def plain() -> Trained:
    """An independent loop: the whole batch at once, by the formula of the documentation."""

    def loss(model: nn.Module, inputs: Tensor, targets: Tensor, _: torch.dtype) -> Tensor:
        losses, weights = smoothed(model(inputs), {"targets": targets})
        return (losses * weights).sum() / weights.sum()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_loop, "_loss", loss)
        return train_plainly(settings(WORDS), dtype="fp64", steps=6)


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, "--train.micro_batch 5"),
        (2, "--train.micro_batch 2"),
        (2, "--mesh.strategy ddp --train.micro_batch 2"),
        (3, ""),
    ],
)
def test_a_run_weighs_tokens_as_one_process_does(ranks: int, more: str, tmp_path: Path) -> None:
    """The fifth batch has two samples: one of three ranks has none."""
    finished = run(ranks, tmp_path, WORDS, more)
    assert relative_difference(finished.parameters, plain().parameters) <= 1e-10
    steps = [record for record in finished.records if "grad_norm" in record]
    assert [one["loss"] for one in steps] == pytest.approx(plain().losses, rel=1e-12)
    assert [one["grad_norm"] for one in steps] == pytest.approx(plain().norms, rel=1e-10)


def test_a_resumed_run_continues_it_on_another_number_of_ranks(tmp_path: Path) -> None:
    assert failures(2, tmp_path, WORDS, "--train.stop_after 3") == [None, None]
    finished = run(1, tmp_path, WORDS)
    assert relative_difference(finished.parameters, plain().parameters) <= 1e-10


def test_an_evaluation_uses_it_over_all_samples(tmp_path: Path) -> None:
    flags = (
        f"{FP64} --train.steps 1 --data.name tests.support.user_code:vectors_with_heldout "
        f"--train.loss {OWN}squared --train.eval_batch 4"
    )
    finished = run(2, tmp_path, flags)
    model = Uneven().double()
    model.load_state_dict(finished.parameters)
    heldout = build_dataset(settings(flags).data).heldout
    assert heldout is not None
    batch = heldout.batch(np.arange(23))
    expected = squared(model(batch["inputs"].double()), batch).mean().item()
    found = next(record for record in finished.records if "eval_loss" in record)
    assert found["eval_loss"] == pytest.approx(expected, rel=1e-12)
    assert "eval_accuracy" not in found


def test_padding_and_what_is_masked_add_nothing_even_if_infinite() -> None:
    model, inputs = Uneven(), torch.randn(4, 12)
    function = LossFunction(model, load_loss(OWN + "infinite_where_masked"))
    data = {"inputs": inputs, "targets": torch.tensor([1, 0, 2, 3])}
    parts = function(model, data, torch.tensor([True, True, True, False]), 3)
    kept = {"targets": torch.tensor([1, 2])}
    assert float(parts.loss_sum) == pytest.approx(float(squared(model(inputs[[0, 2]]), kept).sum()))
    assert parts.weight == 2
    parts.loss_sum.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mean", "returned () for"),
        ("other_rows", "returned (1,) for"),
        ("other_weights", "returned (6,) and weights (1, 3)"),
        ("words", "returned () for"),
        ("misspelt", "failed: KeyError: 'target' ("),
    ],
)
def test_what_cannot_be_weighed_is_refused(name: str, message: str, tmp_path: Path) -> None:
    said = failures(2, tmp_path, f"--train.steps 1 --train.loss {OWN}{name}")
    for line in said:
        assert line is not None
        assert line.startswith(f"ConfigError: --train.loss {OWN}{name} {message}")
        assert "HINT: " in line
