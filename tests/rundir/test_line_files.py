"""Line files after a kill or a full disk: torn lines are left out and named once, and no later record is
lost.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsdp.rundir import history
from fsdp.rundir.history import Appender, RunDir
from tests.support.runs import flags, on_a_rank
from tests.support.world import run_world

TORN = {
    "cut off": b'{"step": 2, "event": "st',
    "NULs": b"\0" * 512,
    "a number": b"12",
    "nested without end": b"[" * 100_000,
}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return history.create(tmp_path / "run")


@pytest.mark.parametrize("torn", TORN.values(), ids=TORN)
def test_a_torn_line_is_left_out_and_named_once(
    torn: bytes, run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    start, end = {"event": "start", "from_step": 0}, {"event": "end", "step": 3, "why": "SIGTERM"}
    run.history.write_bytes(
        json.dumps(start).encode() + b"\n" + torn + b"\n" + json.dumps(end).encode() + b"\n"
    )
    with caplog.at_level(logging.WARNING):
        assert [list(history.read_records(run.history)) for _ in range(3)] == [[start, end]] * 3
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"{run.history}: ")
    assert said.endswith("line 2")


def test_a_torn_run_resumes(tmp_path: Path) -> None:
    """As a full disk leaves it: in every line file and in config.toml."""
    run, words = (
        RunDir(tmp_path / "run"),
        ["--run.dir", str(tmp_path / "run"), *flags("--checkpoint.every_steps 5")],
    )
    assert run_world(1, on_a_rank, [*words, "--train.stop_after", "10"]) == [None]
    for file in (run.history, run.metrics, run.path / "saves.jsonl"):
        with file.open("ab") as stream:
            stream.write(b'{"step": 11, "lo\0\0\0')
    run.config.write_bytes(b"\0" * 100)
    assert run_world(1, on_a_rank, words) == [None]
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == list(range(1, 21))
    assert [event["event"] for event in history.read_records(run.history)] == ["start", "end", "start", "end"]
    [changed] = list(history.read_records(run.history))[2]["changed"]
    assert changed.startswith("config.toml of the last start cannot be compared: ")


# ---------------------------------------------------------------- writing


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Limit the size of this process's files: a write beyond it is cut off and the next fails, as on a full
    disk.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_records_wait_for_room_and_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = Appender(tmp_path / "lines.jsonl")
    file.append({"step": 1})
    with room_for(20):
        for step in (2, 3, 4):
            file.append({"step": step})
        assert steps(file.path) == [1]
    file.append({"step": 5})
    assert steps(file.path) == [1, 2, 3, 4, 5]
    file.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{file.path} cannot be written (File too large): the run continues, and its newest records are kept",
        f"{file.path} is written again",
    ]


def test_a_file_that_is_removed_is_begun_anew_and_one_in_its_place_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`rm metrics.jsonl` in mid-run lost all later records in silence."""
    path = tmp_path / "metrics.jsonl"
    file = Appender(path)
    for step in (1, 2):
        file.append({"step": step})
        path.unlink()
    file.append({"step": 3})
    assert caplog.text.count("metrics.jsonl was removed with its records: a new one is begun") == 2
    assert path.read_text() == '{"step": 3}\n'
    path.unlink()
    path.write_text("of a job that took over")
    file.append({"step": 4})
    file.close()
    assert path.read_text() == "of a job that took over"
