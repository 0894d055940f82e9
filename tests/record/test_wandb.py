"""--run.wandb, with a mock in wandb's place: what it is told. Nothing here leaves the machine."""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import load
from fsdp.record import sinks as sender
from fsdp.record.sinks import WandbSink, check_sinks


class MockRun:
    def __init__(self, given: dict[str, Any]) -> None:
        self.given, self.logged, self.finished = given, list[dict[str, Any]](), False

    def define_metric(self, name: str, step_metric: str = "") -> None:
        self.given[f"axis of {name}"] = step_metric

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def mock_wandb(monkeypatch: pytest.MonkeyPatch) -> list[MockRun]:
    """A mock of the package: each init makes a MockRun."""
    runs: list[MockRun] = []
    module = types.ModuleType("wandb")

    def init(**given: Any) -> MockRun:
        runs.append(MockRun(given))
        return runs[-1]

    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


def test_it_hears_each_number_with_its_step(mock_wandb: list[MockRun], tmp_path: Path) -> None:
    config = load(["--run.wandb", "my-project", "--optim.lr", "0.5"])
    sink = WandbSink(config, tmp_path)
    sink.scalars(7, {"train/loss": 1.5})
    sink.close()
    (run,) = mock_wandb
    assert run.logged == [{"step": 7, "train/loss": 1.5}]
    assert run.finished
    assert (run.given["project"], run.given["name"]) == ("my-project", tmp_path.name)
    assert run.given["config"]["optim.lr"] == 0.5
    assert run.given["axis of *"] == "step"


def test_a_refused_start_is_one_line(
    mock_wandb: list[MockRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a login, and without a terminal to ask for one."""

    def refuse(**given: Any) -> None:
        raise RuntimeError("api_key not configured (no-tty).\ncall wandb.login(key=[your_api_key])")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(ConfigError) as refused:
        WandbSink(load(["--run.wandb", "my-project"]), tmp_path)
    assert str(refused.value) == (
        "--run.wandb my-project: RuntimeError: api_key not configured (no-tty). call "
        "wandb.login(key=[your_api_key]) HINT: wandb login, or export WANDB_MODE=offline, or leave "
        "--run.wandb out"
    )


def test_a_later_start_of_the_same_directory_goes_on_in_the_same_run(
    mock_wandb: list[MockRun], tmp_path: Path
) -> None:
    config = load(["--run.wandb", "p"])
    for folder in (tmp_path, tmp_path, tmp_path / "other"):
        WandbSink(config, folder).close()
    ids = [run.given["id"] for run in mock_wandb]
    assert ids[0] == ids[1] != ids[2]
    assert mock_wandb[0].given["resume"] == "allow"


def test_a_server_that_does_not_answer_does_not_hold_the_end(
    mock_wandb: list[MockRun],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(sender, "CLOSE_S", 0.05)
    monkeypatch.setattr(sender, "_stuck", threading.Event())
    monkeypatch.setattr(MockRun, "finish", lambda self: answers.wait(60))
    WandbSink(load(["--run.wandb", "p"]), tmp_path).close()
    assert not answers.is_set()
    answers.set()
    assert "WandbSink has not taken its last records" in caplog.text
    assert sender.any_stuck()


def test_asked_for_and_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender.importlib.util, "find_spec", lambda _: None)
    check_sinks(load([]))
    with pytest.raises(ConfigError, match=r"--run.wandb p: wandb is not installed. HINT: pip install wandb"):
        check_sinks(load(["--run.wandb", "p"]))
