"""--optim.name muon: the numbers of torch.optim.Muon beside AdamW on the whole model, on any mesh."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from torch import nn

from fsdp.base.errors import ConfigError
from fsdp.optim.muon import hidden_matrices
from tests.support.plain_loop import Trained, relative_difference, train_plainly
from tests.support.runs import failures, run, settings
from tests.support.user_code import TiedWords, Tiny, Uneven

MUON = "--optim.name muon --precision.master fp64 --precision.param fp64 --train.steps 6"
UNEVEN = [f"blocks.{at}.{part}.weight" for at in range(3) for part in ("up", "down")]


@functools.cache
def plain() -> Trained:
    return train_plainly(settings(MUON), dtype="fp64", steps=6)


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, ""),
        (4, "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2"),
        pytest.param(1, "", marks=pytest.mark.long),
        pytest.param(3, "", marks=pytest.mark.long),
        pytest.param(2, "--mesh.strategy ddp", marks=pytest.mark.long),
        pytest.param(3, "--train.micro_batch 1 --mesh.wrap root", marks=pytest.mark.long),
        pytest.param(
            2,
            "--memory.activation_checkpointing full --memory.activation_checkpointing_every 2",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_run_updates_as_torch_s_muon_on_one_process(ranks: int, more: str, tmp_path: Path) -> None:
    finished = run(ranks, tmp_path, MUON, more)
    assert relative_difference(finished.parameters, plain().parameters) <= 1e-12


@pytest.mark.long
def test_a_run_resumes_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    assert failures(2, tmp_path, MUON, "--train.stop_after 2") == [None] * 2
    assert failures(1, tmp_path, MUON, "--train.stop_after 4") == [None]
    finished = run(3, tmp_path, MUON)
    assert relative_difference(finished.parameters, plain().parameters) <= 1e-12


# ---------------------------------------------------------------- its exchange, to the bit


# ---------------------------------------------------------------- which parameters


def names_of(model: nn.Module, wanted: str = "") -> list[str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for parameter in hidden_matrices(model, wanted)]


def test_matrices_inside_repeated_blocks() -> None:
    assert names_of(Uneven()) == UNEVEN
    assert not any("words" in name for name in names_of(TiedWords()))
    layers = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3)
    )
    assert names_of(layers) == ["2.weight", "4.weight"]


@pytest.mark.parametrize(
    ("model", "wanted", "message"),
    [
        (Tiny, "", "--optim.name muon finds no matrix inside repeated blocks of this model. HINT: --optim."),
        (Uneven, "blocks.0.norm.*", "blocks.0.norm.* matches no trained matrix of this model"),
        (
            Uneven,
            "heads",
            "heads matches no trained matrix of this model (of 8). HINT: --optim.muon_parameters head.weight",
        ),
    ],
)
def test_a_model_or_pattern_without_matrices_is_one_line(
    model: type[nn.Module], wanted: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        hidden_matrices(model(), wanted)
