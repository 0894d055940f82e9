"""--run.wandb and --run.mlflow with stand-ins for their packages: what they receive. A server that is slow,
away or gone does not hold the steps. Nothing here leaves the machine.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import load
from fsdp.record import sinks
from fsdp.record.sinks import WandbSink, check_sinks


class MockRun:
    """A run at a server that answers once it is `open`, with an error in the calls of `fails`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments, self.logged, self.finished = arguments, list[dict[str, Any]](), False
        self.open, self.asked = threading.Event(), threading.Event()
        self.fails: Sequence[int] = ()
        self.open.set()

    def define_metric(self, name: str, step_metric: str = "") -> None:
        self.arguments[f"axis of {name}"] = step_metric

    def log(self, values: dict[str, Any]) -> None:
        self.asked.set()
        assert self.open.wait(60)
        self.logged.append(values)
        if len(self.logged) in self.fails:
            raise ConnectionError("the server is away")

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[MockRun]:
    """Each wandb.init makes a MockRun."""
    made: list[MockRun] = []
    module = types.ModuleType("wandb")

    def init(**arguments: Any) -> MockRun:
        made.append(MockRun(arguments))
        return made[-1]

    module.init = init  # type: ignore[attr-defined]
    module.Table = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return made


def test_wandb_receives_each_number_with_its_step(runs: list[MockRun], tmp_path: Path) -> None:
    sink = WandbSink(load(["--run.wandb", "my-project", "--optim.lr", "0.5"]), tmp_path)
    sink.scalars(7, {"train/loss": 1.5})
    sink.texts(7, {"eval/answers": [{"question": "a", "answer": "b"}]})
    sink.close()
    (run,) = runs
    table = {"columns": ["question", "answer"], "data": [["a", "b"]]}
    assert run.logged == [{"step": 7, "train/loss": 1.5}, {"step": 7, "eval/answers": table}]
    assert run.finished
    assert (run.arguments["project"], run.arguments["name"]) == ("my-project", tmp_path.name)
    assert run.arguments["config"]["optim.lr"] == 0.5
    assert run.arguments["axis of *"] == "step"


def test_a_refused_start_is_one_line(
    runs: list[MockRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a login, and without a terminal to ask for one."""

    def refuse(**_: Any) -> None:
        raise RuntimeError("api_key not configured (no-tty).\ncall wandb.login(key=[your_api_key])")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    message = (
        "^--run.wandb p: RuntimeError: api_key not .* HINT: wandb login, or export WANDB_MODE=offline, or"
    )
    with pytest.raises(ConfigError, match=message):
        WandbSink(load(["--run.wandb", "p"]), tmp_path)


def test_a_later_start_of_the_same_directory_continues_the_same_run(
    runs: list[MockRun], tmp_path: Path
) -> None:
    for folder in (tmp_path, tmp_path, tmp_path / "other"):
        WandbSink(load(["--run.wandb", "p"]), folder).close()
    ids = [run.arguments["id"] for run in runs]
    assert ids[0] == ids[1] != ids[2]
    assert runs[0].arguments["resume"] == "allow"


def test_the_steps_do_not_wait_for_a_slow_server_whose_failure_is_logged_once(
    runs: list[MockRun], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = WandbSink(load(["--run.wandb", "p"]), tmp_path)
    (run,) = runs
    run.open.clear()
    run.fails = (1,)
    sink.scalars(1, {})
    assert run.asked.wait(30)
    for step in (2, 3):
        sink.scalars(step, {})  # returns though the server does not
    run.open.set()
    sink.close()
    assert [values["step"] for values in run.logged] == [1, 2, 3]
    assert run.finished
    first, again = caplog.messages
    assert first.startswith("step 1: WandbSink cannot write: ConnectionError: the server is away (")
    assert again == "step 3: WandbSink writes again, 1 records are lost"


def test_the_end_of_a_run_waits_for_a_dead_server_so_long(
    runs: list[MockRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sinks, "CLOSE_S", 0.05)
    monkeypatch.setattr(sinks, "STUCK", threading.Event())
    sink = WandbSink(load(["--run.wandb", "p"]), tmp_path)
    runs[0].open.clear()
    sink.scalars(1, {})
    sink.close()
    runs[0].open.set()
    assert "WandbSink has not taken its last records 0.05 s after the last step" in caplog.text
    assert sinks.STUCK.is_set()


@pytest.mark.parametrize(("flag", "package"), [("wandb", "wandb"), ("mlflow", "mlflow-skinny")])
def test_one_that_is_not_installed_is_one_line(
    flag: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda _: None)
    check_sinks(load([]))
    message = f"--run.{flag} p: {flag} is not installed. HINT: pip install {package}"
    with pytest.raises(ConfigError, match=message):
        check_sinks(load([f"--run.{flag}", "p"]))
