"""Flags of --watch, the files in RUN/watch after an ordinary run, and who prints a failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp import config as configuration
from fsdp.config import config_hash
from fsdp.watch.observe import Observation
from fsdp.watch.records import EVIDENCE, KEPT, RecordFiles, TimingRecorder
from tests.support.runs import run

ROOT = Path(__file__).parents[2]


def test_an_ordinary_run_writes_its_times_and_no_verdict(tmp_path: Path) -> None:
    run(2, tmp_path, "--train.steps 40 --watch.enabled true")
    left = {path.name for path in (tmp_path / "watch").iterdir()}
    assert left <= {"timing.jsonl", "late.jsonl"}


def test_flags_of_the_watch_do_not_change_the_config_hash() -> None:
    plain = configuration.load([])
    for flag in ("enabled false", "hang_s 5", "late_percent 0", "divergence 3"):
        name, value = flag.split()
        assert config_hash(configuration.load([f"--watch.{name}", value])) == config_hash(plain)
    assert config_hash(configuration.load(["--watch.deterministic"])) != config_hash(plain)


def told(step: int, slow: float) -> list[Observation]:
    spent = {"forward": 0.01 * step, "waiting": 0.002 * step}
    return [
        Observation(
            rank,
            f"n{1 + rank // 2}",
            step=step,
            steps=step,
            work=[(n, 0.02 * (slow if rank == 1 else 1 + 0.001 * (n % 3))) for n in range(step - 30, step)],
            spent=spent,
        )
        for rank in range(4)
    ]


@pytest.mark.parametrize(("percent", "says"), [(7.0, 1), (50.0, 0), (0.0, 0)])
def test_late_percent_decides_who_is_late(tmp_path: Path, percent: float, says: int) -> None:
    said: list[list[str]] = []
    timing = TimingRecorder(percent, RecordFiles(tmp_path), said.append)
    timing.update(10.0, told(440, 1.18))
    assert len(said) == says
    assert not says or said[0] == ["watch: rank 1 (n1) is late by 18% since step 410"]


def test_times_are_means_per_step_over_a_growing_interval(tmp_path: Path) -> None:
    files = RecordFiles(tmp_path)
    timing = TimingRecorder(0.0, files, lambda _: None)
    timing._began = 0.0
    for at in range(10):
        timing.update(1000.0 + 4 * at, told(100 + 10 * at, 1.0))
    files.close()
    lines = [json.loads(line) for line in (tmp_path / "timing.jsonl").read_text().splitlines()]
    assert [(one["from_step"], one["step"]) for one in lines] == [(100, 130), (130, 160), (160, 190)]
    assert lines[0]["ranks"]["2"] == {"forward": pytest.approx(0.01), "waiting": pytest.approx(0.002)}
    assert lines[0] == {**lines[0], "seconds": 12.0}


def test_the_evidence_of_the_newest_verdicts_alone_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / EVIDENCE).touch()
    files = RecordFiles(tmp_path)
    for step in range(KEPT + 3):
        files.put(f"full-disk-{step:06d}/{EVIDENCE}", "[]")
        files.put(f"full-disk-{step:06d}/rank-0.txt", "training:")
    files.close()
    kept = sorted(one.name for one in tmp_path.iterdir())
    assert kept == [*(f"full-disk-{step:06d}" for step in range(3, KEPT + 3)), "mine"]


def test_a_run_directory_that_is_gone_gets_no_record(tmp_path: Path) -> None:
    """The verdict of a run whose folder was renamed stood in the next one's, and made a folder of its own."""
    run = tmp_path / "run"
    run.mkdir()
    files = RecordFiles(run / "watch")
    run.rename(tmp_path / "old")
    files.put("verdicts.jsonl", {"kind": "checkpoint"})
    files.put(f"checkpoint-000003/{EVIDENCE}", "[]")
    files.close()
    assert [one for one in tmp_path.rglob("*") if one.name not in ("run", "old")] == []
    assert not run.exists()
