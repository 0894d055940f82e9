"""Checkpoints on a file system that stalls in a save: it is named, and once it answers again nothing is lost.

The file system is an image of ext4 of its own, frozen with fsfreeze: its writers wait in the kernel.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.runs import QUIET, run

ROOT = Path(__file__).parents[2]
STEPS, EVERY = 60, 10
PATIENCE_S = 90.0
KEEPER = """
mount -o loop "$0" "$1" && echo mounted || exit 1
while read -r act; do fsfreeze "$act" "$1" && echo done; done
fsfreeze -u "$1" 2>/dev/null
"""
"""Thaws and ends when its input ends, so that a test that is killed leaves no process waiting for ever."""


@dataclass(frozen=True)
class Disk:
    """A file system that can be frozen. `path` is the same for every process."""

    keeper: subprocess.Popen[str]
    path: Path

    def freeze(self) -> None:
        self._do("-f")

    def thaw(self) -> None:
        self._do("-u")

    def _do(self, act: str) -> None:
        assert self.keeper.stdin is not None
        assert self.keeper.stdout is not None
        print(act, file=self.keeper.stdin, flush=True)
        assert self.keeper.stdout.readline() == "done\n"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    keep = ["unshare", "--mount", "sh", "-c", KEEPER, str(image), str(place)]
    with subprocess.Popen(keep, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        if keeper.stdout.readline() != "mounted\n":
            pytest.skip("no mount namespace with a loop device of one's own here")
        yield Disk(keeper, Path(f"/proc/{keeper.pid}/root{place}"))
        keeper.stdin.close()


def wait_for(found: Callable[[], bool], what: str) -> None:
    late = time.monotonic() + PATIENCE_S
    while not found():
        assert time.monotonic() < late, what
        time.sleep(0.01)


def records(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.slow
@pytest.mark.long
def test_a_run_waits_for_its_storage_and_loses_nothing(disk: Disk, tmp_path: Path) -> None:
    words = f"--train.steps {STEPS} --checkpoint.every_steps {EVERY}"
    folder, gate = tmp_path / "run", tmp_path / "gate"
    quiet = [one.replace("user_code:vectors", "gated:vectors") for one in QUIET]
    data = ["--data.args.last=180", f"--data.args.gate={gate}"]  # 30 steps of 6 samples a rank
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "train.py",
    ]
    own = f"--run.dir {folder} --checkpoint.dir {disk.path}/checkpoints {words} --watch.enabled true"
    with subprocess.Popen(
        [*command, *quiet, *data, *own.split()], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as job:
        try:
            wait_for(lambda: any(disk.path.glob(f"checkpoints/step-*{EVERY}/manifest.json")), "no checkpoint")
            disk.freeze()
            gate.touch()
            wait_for(lambda: bool(records(folder / "watch/verdicts.jsonl")), "no verdict")
            stalled_at = len(records(folder / "metrics.jsonl"))
        finally:
            disk.thaw()
        assert job.stderr is not None
        printed = job.stderr.read()
        assert job.wait(PATIENCE_S) == 0, printed
    [verdict] = records(folder / "watch/verdicts.jsonl")
    assert verdict["kind"] == "storage", verdict
    assert "its storage is slow" in printed
    assert re.search(r"ends the job in 59\d s unless it continues", printed)
    assert "watch: the run continues" in printed
    assert EVERY <= stalled_at < STEPS
    unbroken = run(2, tmp_path / "unbroken", words)
    losses = [(one["step"], one["loss"]) for one in records(folder / "metrics.jsonl") if "loss" in one]
    assert losses == [(one["step"], one["loss"]) for one in unbroken.records if "loss" in one]
    assert (folder / "DONE").exists()
