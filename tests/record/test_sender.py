"""Records on their way to a server that is slow, away or gone: the steps do not wait for it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp.config import load
from fsdp.record import sinks as sender
from fsdp.record.sinks import MlflowSink, Sender, TimedRecord


class Server:
    """Takes entries once it is `open`; fails in the calls named in `fails`."""

    def __init__(self, fails: Sequence[int] = ()) -> None:
        self.open, self.asked = threading.Event(), threading.Event()
        self.calls: list[list[int]] = []
        self.fails, self.finished = fails, False

    def send(self, entries: Sequence[TimedRecord]) -> None:
        self.asked.set()
        assert self.open.wait(30)
        self.calls.append([step for step, _, _ in entries])
        if len(self.calls) in self.fails:
            raise ConnectionError("the server is away")

    def finish(self) -> None:
        self.finished = True


def test_records_wait_for_a_slow_server_and_go_together() -> None:
    server = Server()
    sends = Sender("S", server.send, server.finish)
    sends.put(1, {"a": 1.0})
    assert server.asked.wait(30)
    for step in (2, 3, 4):
        sends.put(step, {"a": 1.0})  # returns though the server does not
    server.open.set()
    sends.close()
    assert server.calls == [[1], [2, 3, 4]]
    assert server.finished


def test_a_server_that_fails_loses_those_records_and_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(fails=(1,))
    sends = Sender("S", server.send, server.finish)
    sends.put(1, {})
    assert server.asked.wait(30)
    sends.put(2, {})
    server.open.set()
    sends.close()
    assert caplog.messages == [
        "step 1: S cannot write: the server is away. The run continues",
        "step 2: S writes again, 1 records are lost",
    ]


def test_the_end_of_a_run_waits_for_a_dead_server_so_long(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "CLOSE_S", 0.1)
    server = Server()
    sends = Sender("S", server.send, server.finish)
    sends.put(1, {})
    assert server.asked.wait(30)
    sends.close()
    assert "S has not taken its last records 0.1 s after the last step" in caplog.text
    server.open.set()


def test_mlflow_is_called_beside_the_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a stand-in for MLflow whose server does not answer at first."""
    server, logged = Server(), list[Any]()

    class Client:
        def log_batch(self, run: str, metrics: Sequence[Any] = (), params: Sequence[Any] = ()) -> None:
            if metrics:
                server.send([(one.step, {}, 0.0) for one in metrics])
                logged.extend((one.key, one.value, one.step) for one in metrics)

        def __getattr__(self, name: str) -> Any:
            found = SimpleNamespace(info=SimpleNamespace(run_id="r"), experiment_id="1")
            return lambda *_, **__: [] if name == "search_runs" else found

    def metric(key: str, value: float, timestamp: int, step: int) -> SimpleNamespace:
        assert timestamp > 1.7e12
        return SimpleNamespace(key=key, value=value, step=step)

    entities = SimpleNamespace(Metric=metric, Param=lambda *_: None)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client, entities=entities))
    sink = MlflowSink(load(["--run.mlflow", "e"]), tmp_path)
    for step in (1, 2, 2, 3):
        sink.scalars(step, {"loss": 1.0 / step})  # returns though the server does not
    server.open.set()
    sink.close()
    assert logged == [("loss", 1.0 / step, step) for step in (1, 2, 3)]
