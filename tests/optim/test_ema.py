"""--optim.ema: the average that a loop in one process has, on any mesh; saved, evaluated and exported."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import plain_loop
from tests.support.plain_loop import relative_difference, train_plainly
from tests.support.runs import failures, run, settings
from tests.support.user_code import Uneven, Vectors

FP64 = "--precision.master fp64 --precision.param fp64 --train.steps 6"
EMA = f"{FP64} --optim.ema 0.9"


class Averaging:
    """AdamW that keeps the average of its parameters from step `first` on."""

    def __init__(self, model: nn.Module, first: int, found: dict[str, Tensor]) -> None:
        self._optimizer = made(model)
        self.param_groups = self._optimizer.param_groups
        self.zero_grad = self._optimizer.zero_grad
        self._named, self._found, self._left = dict(model.named_parameters()), found, first
        self._keep()

    def _keep(self) -> None:
        for name, parameter in self._named.items():
            self._found[name] = parameter.detach().clone()

    def step(self) -> None:
        self._optimizer.step()
        self._left -= 1
        if self._left >= 0:
            self._keep()
            return
        for name, parameter in self._named.items():
            self._found[name] = 0.9 * self._found[name] + 0.1 * parameter.detach()


made = plain_loop._adamw


@functools.cache
def plain(first: int = 0) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_loop, "_adamw", lambda model: Averaging(model, first, found))
        train_plainly(settings(FP64), dtype="fp64", steps=6)
    return found


def exported(folder: Path, name: str = "full_model_ema") -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(folder / name / "full-model.pt", weights_only=True)
    return found


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, ""),
        (4, "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2"),
        pytest.param(1, "", marks=pytest.mark.long),
        pytest.param(3, "--mesh.reshard_after_forward step --train.micro_batch 1", marks=pytest.mark.long),
        pytest.param(2, "--mesh.strategy ddp", marks=pytest.mark.long),
    ],
)
def test_the_export_is_the_average_of_one_process(ranks: int, more: str, tmp_path: Path) -> None:
    found = run(ranks, tmp_path, EMA, more)
    assert relative_difference(exported(tmp_path), plain()) <= 1e-12
    assert relative_difference(exported(tmp_path), found.parameters) > 1e-3


@pytest.mark.long
def test_it_resumes_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    assert failures(2, tmp_path, EMA, "--train.stop_after 2") == [None] * 2
    assert failures(1, tmp_path, EMA, "--train.stop_after 4") == [None]
    run(3, tmp_path, EMA)
    assert relative_difference(exported(tmp_path), plain()) <= 1e-12


# ---------------------------------------------------------------- turned on and off


# ---------------------------------------------------------------- evaluated


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh", ["--mesh.strategy fsdp", pytest.param("--mesh.strategy ddp", marks=pytest.mark.long)]
)
def test_an_evaluation_has_both_and_training_is_the_same(mesh: str, tmp_path: Path) -> None:
    more = "--data.name tests.support.user_code:vectors_with_heldout --train.eval_every_steps 1"
    more += " --checkpoint.every_steps 1 --mesh.reshard_after_forward " + (
        "false" if "fsdp" in mesh else "true"
    )
    found = run(2, tmp_path / "with", EMA, more, mesh)
    without = run(2, tmp_path / "without", FP64, more, mesh)
    assert all(torch.equal(found.parameters[n], p) for n, p in without.parameters.items())
    last = [one for one in found.records if "eval_loss" in one][-1]
    for name, weights in (("eval_", found.parameters), ("eval_ema_", exported(tmp_path / "with"))):
        loss, accuracy = heldout(weights)
        assert last[f"{name}loss"] == pytest.approx(loss, rel=1e-12)
        assert last[f"{name}accuracy"] == pytest.approx(accuracy)
    assert last["eval_loss"] != last["eval_ema_loss"]


def heldout(weights: dict[str, Tensor]) -> tuple[float, float]:
    model, data = Uneven().double(), Vectors(23)
    model.load_state_dict(weights)
    with torch.no_grad():
        logits = model(data.inputs.double())
    return float(F.cross_entropy(logits, data.targets)), float(
        (logits.argmax(-1) == data.targets).double().mean()
    )


# ---------------------------------------------------------------- exported


# ---------------------------------------------------------------- with other flags
