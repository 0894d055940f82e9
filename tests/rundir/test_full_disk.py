"""A full disk: training continues without its records, and a start without room is refused in one line.

The disk is a tmpfs of its own, in a mount namespace that a sleeping process holds open.
"""

from __future__ import annotations

import json
import os
import shlex
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.rundir.filling import fill
from tests.support.processes import dies_with_us
from tests.support.runs import QUIET

ROOT = Path(__file__).parents[2]
SIZE = "size=6m"
BATCH, STEPS = 12, 60
"""Steps enough for each file to need another block while the disk is full."""


@dataclass(frozen=True)
class SmallDisk:
    """`inside` is its path for what `start` starts, `outside` for this process."""

    keeper: int
    inside: Path

    @property
    def outside(self) -> Path:
        return Path(f"/proc/{self.keeper}/root{self.inside}")

    def start(self, *command: str, output: str = "") -> subprocess.CompletedProcess[str]:
        """`output`: the file on the disk that standard output goes to."""
        enter = ["nsenter", "--target", str(self.keeper), "--mount", f"--wdns={ROOT}"]
        shell = ["bash", "-c", f"exec {shlex.join(command)}{f' >{output}' if output else ''}"]
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        return subprocess.run(
            [*enter, *shell], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200
        )

    def names(self, folder: str = "") -> list[str]:
        return sorted(path.name for path in (self.outside / folder).iterdir())

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Every line of a file on the disk; a torn one fails the test."""
        return [json.loads(line) for line in (self.outside / name).read_text().splitlines()]


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SmallDisk]:
    """Mounted with SIZE, or with the options that the test gives."""
    place = tmp_path / "disk"
    place.mkdir()
    options = getattr(request, "param", SIZE)
    mount = f"mount -t tmpfs -o {options} small {shlex.quote(str(place))}"
    mount += " && echo mounted && exec sleep infinity"
    keep = ["unshare", "--mount", *dies_with_us(), "sh", "-c", mount]
    with subprocess.Popen(keep, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        try:
            if keeper.stdout.readline() != "mounted\n":
                pytest.skip(f"no mount namespace of one's own here: {keeper.stderr.read().strip()}")
            yield SmallDisk(keeper.pid, place)
        finally:
            keeper.kill()


def words(disk: SmallDisk, *more: str, fill_at: int = 0, free_at: int = 0) -> list[str]:
    data = {"ballast": disk.inside / "ballast", "fill_at": fill_at * BATCH, "free_at": free_at * BATCH}
    args = [word for name, value in data.items() for word in (f"--data.args.{name}", str(value))]
    own = [
        "--train.steps",
        str(STEPS),
        "--data.name",
        "tests.rundir.filling:vectors",
        *args,
        "--data.workers",
        "0",
        "--run.log_every_steps",
        "1",
    ]
    return [*QUIET, *own, "--run.dir", str(disk.inside / "run"), *more]


def one_rank(disk: SmallDisk, *more: str, **when: int) -> list[str]:
    return [sys.executable, "train.py", *words(disk, *more, **when)]


def whole_events(folder: Path) -> bool:
    """TensorBoard's framing: length, 4 bytes, payload, 4 bytes, again and again to the end of each file."""
    for file in folder.iterdir():
        data, at = file.read_bytes(), 0
        while at < len(data):
            at += 16 + struct.unpack_from("<Q", data, at)[0]
        if at != len(data):
            return False
    return True


@pytest.mark.long
@pytest.mark.slow
def test_a_run_trains_to_its_end_and_resumes_when_there_is_room(disk: SmallDisk) -> None:
    """The save of step 24 is sealed, that of 48 fails and is passed over, the last one fails and is the run's
    error. The log is on the full disk, too.
    """
    saves = ("--checkpoint.every_steps", "24", "--checkpoint.mode", "blocking")
    full = disk.start(*one_rank(disk, *saves, fill_at=34), output=str(disk.inside / "log"))
    assert full.returncode == 4, full.stderr
    assert "Traceback" not in full.stderr
    assert "Exception" not in full.stderr
    assert (
        full.stderr.count("metrics.jsonl cannot be written (No space left on device): the run continues") == 1
    )
    assert (
        full.stderr.count("the steps' lines cannot be printed (No space left on device): the run continues")
        == 1
    )
    assert "CHECKPOINT of step 48 was NOT saved" in full.stderr
    error, saved, command = full.stderr.splitlines()[-3:]
    assert error.startswith(f"train.py: step {STEPS} was not saved: ")
    assert "step 24 is saved" in saved
    assert command.endswith("# resumes here")
    before = [record["step"] for record in disk.lines("run/metrics.jsonl")]
    assert before == list(range(1, len(before) + 1))
    assert 30 <= len(before) < STEPS
    assert f"metrics.jsonl could not be written to the end: {STEPS - len(before)} records lost" in full.stderr
    assert whole_events(disk.outside / "run/tensorboard")
    assert (disk.outside / "log").read_text().startswith(f"step  1/{STEPS}")

    (disk.outside / "ballast").unlink()
    again = disk.start(*one_rank(disk, *saves))
    assert again.returncode == 0, again.stderr
    assert "resumes from step 24" in again.stderr
    assert [record["step"] for record in disk.lines("run/metrics.jsonl")] == list(range(1, STEPS + 1))
    assert [event["event"] for event in disk.lines("run/history.jsonl")][-2:] == ["start", "end"]
    assert (disk.outside / "run/DONE").exists()


def test_a_start_on_a_full_disk_is_refused_in_one_line_with_a_hint(disk: SmallDisk) -> None:
    (disk.outside / "run").mkdir()
    fill(disk.outside / "ballast")
    refused = disk.start(*one_rank(disk))
    run = disk.inside / "run"
    assert refused.returncode == 4
    [line] = [line for line in refused.stderr.splitlines() if "HINT" in line]
    assert line.startswith(f"train.py: {run} cannot be written (No space left on device). HINT: df -h {run}")
    assert "Traceback" not in refused.stderr
    for command in (f"df -h {run}", f"df -i {run}"):
        assert command in line
        assert disk.start(*command.split()).returncode == 0
    assert disk.names("run") == ["logs", "tensorboard"], "partial files are removed"
