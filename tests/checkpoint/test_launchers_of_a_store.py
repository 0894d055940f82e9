"""Launchers of a run directory in an object store: the lock, records and RUN/FAILED are in the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp.checkpoint.object_store import ObjectStore
from fsdp.checkpoint.run_files import RunFiles
from fsdp.rundir import history
from fsdp.rundir.line_files import append
from fsdp.rundir.lock import hold
from fsdp.rundir.paths import open_run
from launch import submit
from launch.marker import Failure, Marker, marker_of
from launch.policy import Kind
from launch.slurm_job import main as slurm_job
from tests.checkpoint.dying_model import VARIABLE
from tests.checkpoint.test_run_in_store import ENDS_S, MORE, losses, records, started, url
from tests.support.runs import flags, settings

__all__ = ["url"]
pytestmark = pytest.mark.needs("s3")


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    monkeypatch.setenv("SHARDRUN_TOKEN", "7-0-0")
    return tmp_path / "machine"


def judged(url: str) -> int:
    return slurm_job(["judge", url, "--job", "7", "--code", "1"])


def test_a_job_begins_and_is_judged_on_any_machine(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["begin", "--default-run-dir", "runs/x", *flags("--run.dir", url)]
    assert slurm_job(words) == 0
    run = open_run(url)
    assert capsys.readouterr().out == f"{url}\n{run.path}\n"
    assert run.path.is_relative_to(tmp_path / "machine")
    # a start writes, and its machine is lost before an end
    append(run.history, {"event": "start", "from_step": 0})
    append(run.metrics, {"step": 4})
    RunFiles(ObjectStore(url), run.path).upload()
    marker = marker_of(settings("--run.dir", url))
    assert marker is not None
    marker.write(Failure(Kind.ERROR, 6, "memory"), rank=3)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert judged(url) == 86
    assert "failed after step 4. Again" in capsys.readouterr().out
    crash = records(url, "history.jsonl")[-1]
    assert (crash["event"], crash["step"], crash["code"]) == ("crash", 4, 6)
    append(open_run(url).history, {"event": "start", "from_step": 4})
    assert judged(url) == 6, "twice at one step"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    assert slurm_job(words) == 0
    assert "FAILED" not in ObjectStore(url).objects()
    assert [event["event"] for event in history.events(open_run(url))] == ["start", "crash"] * 2
    assert Marker(open_run(url), "7-0-0").read() is None


def test_a_live_run_is_not_begun_judged_or_written(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = ObjectStore(url)
    lock = hold(store, None, "torchrun")
    before = store.objects()
    assert slurm_job(["begin", "--default-run-dir", "runs/x", *flags("--run.dir", url)]) == 4
    assert f"{url} is being written by process" in capsys.readouterr().err
    assert judged(url) == 4
    assert store.objects() == before
    lock.release()


def test_a_submitted_job_has_its_code_and_logs_in_a_new_folder(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    batch = submit.plan(flags("--run.dir", url))
    assert batch.folder.parent == tmp_path / "runs"
    assert [run.place for run in batch.runs] == [url]
    assert any(f"runs=({url})" in line for line in submit._before(tmp_path, batch))


def test_rays_controller_reads_the_records_of_another_node(url: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from launch.ray_failure import _progress_of

    there = RunFiles(ObjectStore(url), tmp_path / "there")
    there.take_over()
    append(there.folder / "history.jsonl", {"event": "start", "from_step": 0})
    append(there.folder / "metrics.jsonl", {"step": 4})
    there.upload()
    progress = _progress_of(open_run(url))
    assert (progress.starts, progress.step) == (1, 4)


@pytest.mark.slow
@pytest.mark.long
def test_launch_local_restarts_killed_ranks(url: str, machine: Path) -> None:
    """Each start dies in its 18th step: the second one ends before it."""
    words = ["-m", "launch.local", "--ranks", "2", *flags(MORE)]
    with started(machine, url, *words, **{VARIABLE: "18"}) as process:
        said, _ = process.communicate(timeout=ENDS_S)
    assert process.returncode == 0, said
    assert "a rank ended with SIGKILL after step" in said
    assert f"finished at step 30: {url}" in said
    assert set(losses(records(url, "metrics.jsonl"))) == set(range(1, 31))
    starts = [one["from_step"] for one in records(url, "history.jsonl") if one["event"] == "start"]
    assert starts == [0, 15]
    lock = hold(ObjectStore(url), None, "torchrun")
    with started(machine, url, *words) as process:
        said, _ = process.communicate(timeout=ENDS_S)
    assert process.returncode == 4
    assert f"launch.local: {url} is being written by process" in said
    lock.release()
