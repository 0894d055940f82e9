"""A run begun under Ray is continued by the command that the README prints, under any launcher."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fsdp.config import load, to_toml
from fsdp.rundir import paths
from tests.ray.cluster import REPOSITORY, clean_environment
from tests.ray.runs import STEPS, Driver, Run
from tests.support.locks import acquire

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def readme_command() -> str:
    """`torchrun --nproc_per_node=4 train.py --config RUN/config.toml --run.dir RUN`, as printed."""
    found = re.search(
        r"`(torchrun [^`]*--config RUN/config\.toml --run\.dir RUN)`", (REPOSITORY / "README.md").read_text()
    )
    assert found is not None
    return found[1]


def typed(command: str, run: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """A printed command with RUN filled in and `torchrun`, `python` as this Python's own."""
    words = shlex.split(command.replace("RUN", str(run)))
    programs = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
        "python": [sys.executable],
    }
    return subprocess.run(
        [*programs[words[0]], *words[1:], *flags],
        cwd=REPOSITORY,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.long
def test_begun_under_ray_continued_by_the_readmes_command_and_ended_as_plain_python(
    tmp_path: Path, undisturbed: Run
) -> None:
    place = tmp_path / "run"
    driver = Driver(place, "--ray.num_workers", "2", "--train.stop_after", "8")
    run = driver.finish()
    assert (
        f"python train.py --backend ray --config {place}/config.toml --run.dir {place} --train.stop_after 0"
        in driver.out
    )
    kept = tomllib.loads((place / "config.toml").read_text())
    assert "backend" not in kept
    assert "ray" not in kept
    # a run directory as it was written before
    old = load(["--config", str(place / "config.toml"), "--backend", "ray", "--ray.num_workers", "2"])
    (place / "config.toml").write_text(to_toml(old))
    second = typed(readme_command().replace("node=4", "node=2"), place, "--train.stop_after", "16")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "changed since the last start: backend" not in second.stderr
    third = typed("python train.py --config RUN/config.toml --run.dir RUN", place, "--train.stop_after", "0")
    assert third.returncode == 0, third.stdout + third.stderr
    assert [start["launcher"] for start in run.starts] == ["ray", "torchrun", "a single process"]
    assert run.steps == list(range(1, STEPS + 1))
    for step in range(1, 17):  # two ranks: the same bits
        assert run.losses[step] == undisturbed.losses[step]
    assert run.losses == pytest.approx(undisturbed.losses, abs=1e-5)


def test_ray_asked_for_under_torchrun_is_refused_in_one_line(tmp_path: Path) -> None:
    command = "torchrun --nproc_per_node=2 train.py --backend ray --run.dir RUN"
    done = typed(command, tmp_path / "run")
    assert done.returncode == 1, "torchrun's own code"
    said = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    assert said == [
        "train.py: --backend ray starts the ranks, but torchrun has started them already. "
        "HINT: --backend torchrun, or python train.py --backend ray with nothing in front"
    ]
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_driver_on_a_live_run_directory_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    place = paths.create(tmp_path / "run").path
    lock = acquire(place, "torchrun")
    before = sorted(path for path in place.rglob("*") if path.name != "CLAIM")
    try:
        driver = Driver(place)
        assert driver.wait(120) == 4, driver.said()
        (line,) = driver.err.splitlines()
        assert line.startswith(f"train.py: {place} is being written by process ")
        assert sorted(path for path in place.rglob("*") if path.name != "CLAIM") == before
    finally:
        lock.release()
