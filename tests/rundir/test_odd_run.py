"""Folders and links in the place of a run directory's files: a decision or a line, no write outside.

tests/report has the tools that read a run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp.rundir import history
from fsdp.rundir.paths import RunDir
from launch import slurm_job
from launch.guard import TOKEN
from tests.support.runs import QUIET, on_a_rank
from tests.support.world import run_world


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def fresh(run: RunDir) -> None:
    shutil.rmtree(run.path, ignore_errors=True)
    run.path.mkdir()


def test_the_marker_of_an_end_has_its_reason_until_the_next_start(run: RunDir) -> None:
    fresh(run)
    for marker in (run.stopped, run.done):
        history.write_marker(marker, "the deadline at step 7\n")
        assert marker.read_text() == "the deadline at step 7\n"
    history.remove_markers(run)
    assert not list(run.path.iterdir())


# ---------------------------------------------------------------- things that are no files


def as_folder(path: Path, _: Path) -> None:
    path.mkdir()


def as_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


@pytest.mark.parametrize("form", [as_folder, as_link])
@pytest.mark.parametrize("name", ["metrics.jsonl", "FAILED", "STOPPED", "DONE"])
def test_another_thing_in_the_place_of_a_file_is_a_decision_or_a_line(
    form: Callable[[Path, Path], None],
    name: str,
    run: RunDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outside = tmp_path / "outside"
    outside.write_text('{"step": 9}\n{"step": 10}\n')
    monkeypatch.setenv(TOKEN, "t")
    fresh(run)
    form(run.path / name, outside)
    assert slurm_job.main(["judge", str(run.path), "--job", "7", "--code", "1"]) in range(256)
    assert slurm_job.main(["begin", "--", "--run.dir", str(run.path)]) in (0, 2)
    history.truncate(run.metrics, 9)
    assert outside.read_text() == '{"step": 9}\n{"step": 10}\n'


@pytest.mark.slow
def test_a_start_that_cannot_record_itself_leaves_the_configuration_as_it_was(run: RunDir) -> None:
    """As in another user's directory, whose config.toml became a file of the refused user's."""
    fresh(run)
    run.history.mkdir()
    run.config.write_text("# the first user's\n")
    (said,) = run_world(1, on_a_rank, ["--run.dir", str(run.path), *QUIET])
    assert str(said).startswith(
        f"ConfigError: {run.history} cannot be written (Is a directory). HINT: ls -ld"
    )
    assert run.config.read_text() == "# the first user's\n"
