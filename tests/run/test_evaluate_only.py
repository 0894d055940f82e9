"""--train.evaluate_only: a checkpoint's loss on any number of ranks is the one that training recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp.checkpoint.inspect import scan
from fsdp.checkpoint.store import open_store
from tests.support.runs import failures, finished, flags, on_a_rank
from tests.support.world import run_world

HELD = "--data.name tests.support.user_code:vectors_with_heldout --precision.master fp64"
TRAINED = "--train.eval_every_steps 10 --checkpoint.every_steps 10 --checkpoint.keep_last 0 --optim.ema 0.9"


def evaluated(ranks: int, folder: Path, *more: str) -> list[dict[str, float]]:
    """The records of an evaluation alone."""
    words = ["--run.dir", str(folder), *flags(HELD, "--train.evaluate_only true --optim.ema 0.9", *more)]
    assert run_world(ranks, on_a_rank, words) == [None] * ranks
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def numbers(record: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name.startswith("eval_")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert failures(2, folder, HELD, TRAINED) == [None, None]
    return folder


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_the_loss_is_the_recorded_one(ranks: int, trained: Path, tmp_path: Path) -> None:
    recorded = [one for one in finished(trained).records if "eval_loss" in one]
    for at, path in ((10, trained / "checkpoints" / "step-00000010"), (20, trained)):
        found = evaluated(ranks, tmp_path / str(at), "--checkpoint.resume", str(path))
        expected = next(one for one in recorded if one["step"] == at)
        assert [one["step"] for one in found] == [at]
        assert numbers(found[0]) == pytest.approx(numbers(expected), rel=1e-12)
        assert "eval_ema_loss" in found[0]
        assert scan(open_store(str(tmp_path / str(at) / "checkpoints"))) == []
        assert (tmp_path / str(at) / "DONE").exists()


def test_what_cannot_be_evaluated_is_refused(trained: Path, tmp_path: Path) -> None:
    only = "--train.evaluate_only true"
    before = (trained / "config.toml").read_text()
    said = failures(2, trained, HELD, only, "--checkpoint.resume", str(trained))
    assert said[0] is not None
    assert "has checkpoints of its own" in said[0]
    assert f"HINT: --checkpoint.resume {trained} --run.dir {trained}-evaluated" in said[0]
    assert (trained / "config.toml").read_text() == before
    said = failures(1, tmp_path, HELD, only)
    assert said[0] is not None
    assert "no weights are named. HINT: --checkpoint.resume RUN" in said[0]
    said = failures(1, tmp_path, only, "--checkpoint.resume", str(trained))
    assert said[0] is not None
    assert "has no held-out data" in said[0]


@pytest.mark.parametrize("flag", ["eval_every_steps", "eval_every_epochs"])
def test_evaluations_without_held_out_data_are_refused_at_the_start(flag: str, tmp_path: Path) -> None:
    said = failures(1, tmp_path, f"--train.{flag} 1")
    assert said == [
        f"ConfigError: --train.{flag} 1, but --data.name tests.support.user_code:vectors has no held-out "
        f"data. HINT: --train.{flag} 0, or other data: docs/data.md"
    ]
    assert not (tmp_path / "metrics.jsonl").exists()
