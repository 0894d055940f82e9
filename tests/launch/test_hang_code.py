"""The exit code of ranks that the watch ended, where the launcher sees another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp.rundir import paths
from fsdp.rundir.paths import RunDir
from launch.guard import Marker
from launch.policy import EXIT_HUNG, Kind
from launch.slurm_job import end_of

START = 1_800_000_000.0
STARTED = {"event": "start", "from_step": 0, "time": "2027-01-15T08:00:00+00:00"}


def run_with(folder: Path, verdicts: list[tuple[float, str]]) -> RunDir:
    """A run that started at START, with these records of the watch: seconds after it, and kind."""
    run = paths.create(folder / "run")
    run.history.write_text(json.dumps(STARTED) + "\n")
    (run.path / "watch").mkdir()
    lines = [json.dumps({"time": START + after, "kind": kind}) + "\n" for after, kind in verdicts]
    (run.path / "watch/verdicts.jsonl").write_text("".join(lines))
    return run


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([(3, "stopped"), (5, "ended")], EXIT_HUNG),
        ([(3, "collective"), (3, "ended"), (4, "died")], EXIT_HUNG),
        ([(3, "died"), (3, "ended")], 137),
        ([(3, "stopped"), (90, "died"), (90, "ended")], 137),
        ([(3, "stopped")], 137),
        ([(-9, "stopped"), (-8, "ended")], 137),
        ([], 137),
    ],
    ids=["hung", "differing collectives", "died", "died after a pause", "killed", "an earlier start", "none"],
)
def test_a_hang_has_one_code_whatever_the_launcher_saw(
    tmp_path: Path, verdicts: list[tuple[float, str]], code: int
) -> None:
    run = run_with(tmp_path, verdicts)
    end = end_of(run, Marker(run, "this"), 137, starting=False)
    assert (end.kind, end.code) == (Kind.DIED, code)
