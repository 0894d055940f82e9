"""--optim.ema: the average that a loop in one process has, on any mesh; saved, evaluated and exported."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.plan_real import _asks
from fsdp.base.errors import ConfigError
from fsdp.checkpoint.__main__ import main as checkpoint_command
from fsdp.config import OptimSection, config_hash, load
from fsdp.dist.env import DistEnv
from fsdp.memory.account import state_bytes
from fsdp.plan.estimate import memory_of
from fsdp.plan.fake_step import trace_step
from tests.plan.test_measured import BATCH, SMALL, tensors
from tests.support import plain_loop
from tests.support.plain_loop import relative_difference, train_plainly
from tests.support.runs import failures, flags, on_a_rank, run, settings
from tests.support.user_code import TiedWords, Uneven, Vectors
from tests.support.world import run_world

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


def test_it_resumes_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    assert failures(2, tmp_path, EMA, "--train.stop_after 2") == [None] * 2
    assert failures(1, tmp_path, EMA, "--train.stop_after 4") == [None]
    run(3, tmp_path, EMA)
    assert relative_difference(exported(tmp_path), plain()) <= 1e-12


# ---------------------------------------------------------------- turned on and off


def logged(env: DistEnv, words: list[str]) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        assert on_a_rank(env, words) is None
    return stream.getvalue()


def test_a_run_that_turns_it_on_starts_from_the_checkpoint_s_weights(tmp_path: Path) -> None:
    assert failures(2, tmp_path, FP64, "--train.stop_after 2") == [None] * 2
    text = run_world(2, logged, ["--run.dir", str(tmp_path), *flags(EMA)])[0]
    assert "the moving average of 22 parameters starts from the checkpoint's weights" in text
    assert relative_difference(exported(tmp_path), plain(first=2)) <= 1e-12


def test_a_run_that_turns_it_off_drops_it(tmp_path: Path) -> None:
    assert failures(2, tmp_path, EMA, "--train.stop_after 2") == [None] * 2
    text = run_world(2, logged, ["--run.dir", str(tmp_path), *flags(FP64)])[0]
    assert "the checkpoint's moving average of the weights is dropped: --optim.ema is 0" in text
    assert not (tmp_path / "full_model_ema").exists()


# ---------------------------------------------------------------- evaluated


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


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    words = "--model.name tests.support.user_code:TiedWords --data.name tests.support.user_code:sentences"
    found = run(2, tmp_path, words, "--optim.ema 0.5 --train.steps 2")
    average = exported(tmp_path)
    assert average.keys() == found.parameters.keys()
    TiedWords().load_state_dict(average)
    tied = [a for a, _ in TiedWords().named_parameters(remove_duplicate=False)]
    first = {id(p): name for name, p in reversed(list(TiedWords().named_parameters(remove_duplicate=False)))}
    assert len(tied) > len(first)
    assert not torch.equal(average[tied[0]], found.parameters[tied[0]])


@pytest.mark.long
def test_frozen_parameters_are_the_model_s(tmp_path: Path) -> None:
    found = run(2, tmp_path, "--optim.ema 0.5 --train.steps 2 --model.frozen stem.*")
    average = exported(tmp_path)
    assert torch.equal(average["stem.weight"], found.parameters["stem.weight"])
    assert not torch.equal(average["head.weight"], found.parameters["head.weight"])


@pytest.mark.long
def test_of_adapters_the_merged_average_is_exported(tmp_path: Path) -> None:
    found = run(2, tmp_path, "--optim.ema 0.5 --train.steps 3 --lora.rank 2")
    average = exported(tmp_path)
    assert average.keys() == found.parameters.keys()
    assert not torch.equal(average["blocks.0.up.weight"], found.parameters["blocks.0.up.weight"])
    assert torch.equal(average["stem.weight"], found.parameters["stem.weight"])


def test_the_command_exports_that_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(2, tmp_path / "with", "--train.steps 2 --optim.ema 0.5")
    expected = exported(tmp_path / "with")
    assert (
        checkpoint_command([str(tmp_path / "with"), "export", "--ema", "--out", str(tmp_path / "out")]) == 0
    )
    found = exported(tmp_path, "out")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    run(1, tmp_path / "without", "--train.steps 1")
    assert checkpoint_command([str(tmp_path / "without"), "export", "--ema"]) == 2
    assert "holds no moving average of the weights. HINT: " in capsys.readouterr().err


# ---------------------------------------------------------------- with other flags


@pytest.mark.parametrize(
    "more",
    [
        pytest.param("--optim.name sgd --optim.momentum 0", marks=pytest.mark.long),
        pytest.param("--optim.name muon", marks=pytest.mark.long),
        pytest.param("--optim.name torch.optim:NAdam", marks=pytest.mark.long),
        pytest.param("--optim.state bf16", marks=pytest.mark.long),
    ],
)
def test_with_each_optimizer_it_resumes(more: str, tmp_path: Path) -> None:
    usual = f"--train.steps 4 --optim.ema 0.5 {more}"
    expected = run(2, tmp_path / "whole", usual)
    assert failures(2, tmp_path / "parts", usual, "--train.stop_after 2") == [None] * 2
    found = run(2, tmp_path / "parts", usual)
    assert all(torch.equal(found.parameters[n], p) for n, p in expected.parameters.items())
    whole, parts = exported(tmp_path / "whole"), exported(tmp_path / "parts")
    assert all(torch.equal(parts[name], value) for name, value in whole.items())


def test_a_skipped_update_leaves_it_as_it_was(tmp_path: Path) -> None:
    spoilt = "--data.name tests.support.user_code:spoilt_vectors --train.nonfinite skip --train.steps 6"
    run(2, tmp_path, spoilt, "--optim.ema 0.9")
    assert all(value.isfinite().all() for value in exported(tmp_path).values())


def test_older_checkpoints_keep_their_hash() -> None:
    assert config_hash(load([])) == config_hash(load(["--optim.ema", "0"]))
    assert config_hash(load([])) != config_hash(load(["--optim.ema", "0.9"]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--optim.ema 1", "--optim.ema 1.0 is out of range"),
        (
            "--checkpoint.keep_best 1 --checkpoint.keep_best_metric eval_ema_loss --train.eval_every_steps 5",
            "--checkpoint.keep_best_metric eval_ema_loss and --optim.ema 0 do not go together",
        ),
        (
            "--optim.ema 0.9 --memory.nvme optimizer --memory.nvme_dir /tmp",
            "--optim.ema 0.9 and --memory.nvme optimizer do not go together. HINT: --memory.nvme off",
        ),
    ],
)
def test_wrong_values_are_one_line(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(words.split())


@pytest.mark.long
def test_the_bytes_at_rest_and_the_plan_count_it() -> None:
    parameters = list(Uneven().parameters())
    plainly = state_bytes(OptimSection(), parameters, 4)
    assert state_bytes(OptimSection(ema=0.9), parameters, 4) == 1.5 * plainly
    words: Any = (*SMALL, *BATCH, "--optim.ema", "0.99")
    measured = run_world(2, tensors, words)
    planned = [memory_of(trace_step(ask), ask).peak for ask in _asks(words, 2)]
    without = [memory_of(trace_step(ask), ask).peak for ask in _asks(words[:-2], 2)]
    assert planned == pytest.approx(measured, rel=0.01)
    assert planned[0] > 1.05 * without[0]
