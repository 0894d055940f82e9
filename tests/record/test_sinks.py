"""--run.sinks and --run.mlflow: what a sink receives, on which rank, after a resume, and when it fails."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import load
from fsdp.distributed.env import DistEnv
from fsdp.record.sinks import MlflowSink, check_sinks
from tests.support.runs import failures, finished, flags, on_a_rank
from tests.support.world import run_world

OWN = "tests.record.test_sinks:"
EVALUATED = (
    "--data.name tests.support.user_code:vectors_with_heldout --train.steps 4 --train.eval_every_steps 2"
)


class Lines:
    """As in the documentation."""

    def __init__(self, *, run_dir: Path, config: Mapping[str, Any], from_step: int) -> None:
        self.file = (run_dir / "lines.jsonl").open("a")
        self.file.write(json.dumps({"from": from_step, "lr": config["optim.lr"]}) + "\n")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")

    def close(self) -> None:
        self.file.write('"closed"\n')
        self.file.close()


class Failing:
    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if step in (2, 3):
            raise ValueError(f"the server is away at step {step}")

    def close(self) -> None:
        raise RuntimeError("not now")


def logged(env: DistEnv, words: list[str]) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        assert on_a_rank(env, words) is None
    return stream.getvalue()


def lines(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]


def test_a_sink_receives_each_step_and_evaluation_on_rank_0_and_the_step_of_a_resume(tmp_path: Path) -> None:
    words = f"{EVALUATED} --run.sinks {OWN}Lines"
    assert failures(2, tmp_path, words, "--train.stop_after 2") == [None] * 2
    assert failures(2, tmp_path, words) == [None] * 2
    found = lines(tmp_path)
    starts = [one["from"] for one in found if "from" in one]
    assert (starts, found[0]["lr"], found.count("closed")) == ([0, 2], 0.01, 2)
    losses = [(one["step"], one["train/loss"]) for one in found if "train/loss" in one]
    recorded = finished(tmp_path).records
    assert losses == [(one["step"], one["loss"]) for one in recorded if "loss" in one]
    assert [one["step"] for one in found if "eval/eval_loss" in one] == [2, 4]


def test_an_exception_in_a_sink_is_logged_once_and_ends_nothing(tmp_path: Path) -> None:
    words = flags(f"--train.steps 4 --run.sinks {OWN}Failing,{OWN}Lines")
    text = run_world(2, logged, ["--run.dir", str(tmp_path), *words])[0]
    name = f"--run.sinks {OWN}Failing"
    assert text.count("the server is away") == 1
    assert f"step 2: {name} cannot write: ValueError: the server is away at step 2 (" in text
    assert f"step 4: {name} writes again, 2 records are lost" in text
    assert f"{name} cannot be closed: RuntimeError: not now (" in text
    assert [one["step"] for one in lines(tmp_path)[1:-1]] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (OWN + "Liness", "has no attribute 'Liness'"),
        ("nothing", "--run.sinks nothing is not package.module:factory."),
        (f"{OWN}Lines,absent_module:X", "there is no module absent_module"),
    ],
)
def test_a_wrong_name_is_found_before_the_first_collective(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_sinks(load(["--run.sinks", name]))


# ---------------------------------------------------------------- MLflow, with a store of files


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """MLflow's client on a store of files."""
    for name, value in variables(tmp_path).items():
        monkeypatch.setenv(name, value)
    mlflow: Any = importlib.import_module("mlflow")
    return mlflow.MlflowClient()


def variables(folder: Path) -> dict[str, str]:
    return {"MLFLOW_TRACKING_URI": (folder / "store").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}


@pytest.mark.needs("mlflow")
def test_mlflow_has_each_step_once_in_one_run_for_a_run_directory(store: Any, tmp_path: Path) -> None:
    config = load(["--run.mlflow", "digits", "--optim.lr", "0.5"])
    first = MlflowSink(config, tmp_path / "run")
    for step in (1, 2, 3):
        first.scalars(step, {"train/loss": 1.0 / step})
    first.scalars(2, {"eval/eval_loss": 0.5})
    first.close()
    later = MlflowSink(config, tmp_path / "run")
    for step in (2, 3, 4):
        later.scalars(step, {"train/loss": 1.0 / step})
    later.scalars(4, {"eval/eval_loss": 0.25})
    later.close()
    MlflowSink(config, tmp_path / "other").close()
    experiment = store.get_experiment_by_name("digits").experiment_id
    runs = {one.info.run_name: one for one in store.search_runs([experiment])}
    assert sorted(runs) == ["other", "run"]
    run = runs["run"]
    history = store.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((one.step, one.value) for one in history) == [(n, 1.0 / n) for n in (1, 2, 3, 4)]
    assert [one.step for one in store.get_metric_history(run.info.run_id, "eval/eval_loss")] == [2, 4]
    assert run.data.params["optim.lr"] == "0.5"
    assert run.info.status == "FINISHED"
