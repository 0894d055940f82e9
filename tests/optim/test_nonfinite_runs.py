"""A loss or gradient that is no number: all ranks stop at the same step before the update, or leave it out,
with a bound.
"""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from fsdp import config as configuration
from fsdp.base.errors import NotFiniteError, TrainingError
from fsdp.checkpoint.store import LocalStore
from fsdp.data import Cursor
from fsdp.distributed.env import DistEnv
from fsdp.optim.gradients import Verdicts
from fsdp.run.loop import train
from tests.support.marks import quick_are
from tests.support.runs import failures, flags, run
from tests.support.world import run_world

SPOILT = "--data.name tests.support.user_code:spoilt_vectors"
DDP = "--mesh.strategy ddp"
HSDP = "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2"


def step_of(sample: int, global_batch: int = 12) -> int:
    """The first step, counted from 1, that takes this sample."""
    cursor = Cursor(seed=0, samples=48, global_batch=global_batch)
    return next(step + 1 for step in range(cursor.steps_per_epoch) if sample in cursor.indices(step))


@pytest.mark.parametrize(("ranks", "mesh"), [(1, ""), (3, ""), (4, HSDP), (2, DDP)])
def test_one_rank_s_bad_sample_stops_all_at_its_step(ranks: int, mesh: str, tmp_path: Path) -> None:
    texts = failures(ranks, tmp_path, SPOILT, mesh)
    assert len(set(texts)) == 1, texts
    assert str(texts[0]).startswith(
        f"NotFiniteError: step {step_of(7)}: loss nan, gradient norm nan, first in stem.weight on rank"
    )
    assert "HINT: " in str(texts[0])


def save_that_ends_after_the_error(env: DistEnv, words: list[str]) -> str:
    """The save of the step before the bad one is sealed when the error has been raised."""
    raised, seal, error = threading.Event(), LocalStore.seal, Verdicts._error

    def late(self: LocalStore, staged: str, final: str) -> None:
        assert raised.wait(60)
        seal(self, staged, final)

    def seen(self: Verdicts, *about: Any) -> TrainingError:
        raised.set()
        return error(self, *about)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "seal", late)
        patch.setattr(Verdicts, "_error", seen)
        with pytest.raises(NotFiniteError) as caught:
            train(configuration.load(words), env)
    return str(caught.value)


def test_the_save_in_flight_is_sealed(tmp_path: Path) -> None:
    """Before, it was given up with the run: of a large model, a save of minutes."""
    bad = step_of(7)
    every = f"--checkpoint.every_steps {bad - 1}"
    for said in run_world(
        2, save_that_ends_after_the_error, ["--run.dir", str(tmp_path), *flags(SPOILT, every)]
    ):
        assert said.startswith(f"step {bad}: loss nan")
    assert [one.name for one in (tmp_path / "checkpoints").iterdir()] == [f"step-{bad - 1:08}"]
    [record] = [json.loads(line) for line in (tmp_path / "saves.jsonl").read_text().splitlines()]
    assert record["step"] == bad - 1


@pytest.mark.parametrize(("ranks", "mesh"), [(2, ""), (2, DDP)])
def test_skip_drops_the_update_and_continues(ranks: int, mesh: str, tmp_path: Path) -> None:
    finished = run(ranks, tmp_path, SPOILT, mesh, "--train.nonfinite skip --train.steps 8")
    losses = {record["step"]: record["loss"] for record in finished.records if "loss" in record}
    assert sorted(losses) == list(range(1, 9))
    bad = {step for step, loss in losses.items() if loss != loss}
    assert step_of(7) in bad
    assert len(bad) == 2  # once an epoch of four steps
    assert all(value.isfinite().all() for value in finished.parameters.values())


def test_skipping_has_a_bound(tmp_path: Path) -> None:
    all_bad = f"{SPOILT} --data.args.count 1 --data.args.spoil 0 --train.global_batch 1"
    for text in failures(2, tmp_path, all_bad, "--train.nonfinite skip --train.max_skipped 3"):
        assert "step 4: loss nan" in str(text)
        assert "not finite 4 times in a row" in str(text)


def test_a_good_step_resets_the_count_of_skips(tmp_path: Path) -> None:
    """A bad step in each of three epochs: never two in a row, so a bound of one is not reached."""
    finished = run(1, tmp_path, SPOILT, "--train.nonfinite skip --train.max_skipped 1 --train.steps 12")
    assert sum(record["loss"] != record["loss"] for record in finished.records if "loss" in record) == 3


@pytest.mark.parametrize(("ranks", "mesh"), quick_are([(1, "")], [(1, ""), (2, ""), (2, DDP)]))
def test_an_fp16_overflow_halves_the_scale_and_training_continues(
    ranks: int, mesh: str, tmp_path: Path
) -> None:
    finished = run(
        ranks, tmp_path, mesh, "--precision.param fp16 --precision.loss_scale 4e6 --train.max_skipped 20"
    )
    losses = [record["loss"] for record in finished.records if "loss" in record]
    norms = [record["grad_norm"] for record in finished.records if "loss" in record]
    assert all(loss == loss for loss in losses)
    assert not math.isfinite(norms[0])
    assert all(math.isfinite(norm) for norm in norms[-5:])
    assert all(value.isfinite().all() for value in finished.parameters.values())
