"""One run directory and two hosts: the second job is refused, and takes over after the first host fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, Shape, missing
from tests.support.processes import eventually

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.slurm]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if missing():
        pytest.skip(missing() or "")
    with Cluster(tmp_path / "slurm", Shape(nodes=2)) as slurm:
        yield slurm


def reached(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def train(run_dir: Path, node: str, steps: int) -> list[str]:
    words = [
        "python",
        "train.py",
        "--run.dir",
        str(run_dir),
        "--model.name",
        "mlp",
        "--checkpoint.every_steps",
        "10",
    ]
    # or the holder would take a core for as long as it is watched
    words += ["--data.name", "tests.slurm.slow:digits"]
    words += ["--train.global_batch", "16", "--train.steps", "100000", "--train.stop_after", str(steps)]
    return ["srun", "-N1", "-n1", "--overlap", "-w", node, "--export=ALL,SLOW_S=0.05", *words]


def test_a_job_on_another_node_is_refused_and_takes_over_when_the_holder_is_gone(
    cluster: Cluster, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with cluster.popen(*train(run_dir, "n1", 100_000)) as first:
        eventually("step 25 on n1", lambda: reached(run_dir) >= 25, 120)
        second = cluster.run(*train(run_dir, "n2", 100_000), check=False, timeout_s=120)
        assert second.returncode == 4
        assert f"{run_dir} is being written by process" in second.stderr
        assert " on n1, started by " in second.stderr
        assert first.poll() is None, "the holder trains on"
        cluster.power_off("n1")
        last = reached(run_dir)
        third = cluster.run(*train(run_dir, "n2", last + 30), timeout_s=240)
        assert "took over from process" in third.stderr
        assert "on n1" in third.stderr
        assert "gave no sign for 20 s" in third.stderr
        assert "resumes from step" in third.stderr
        assert reached(run_dir) == last + 30
        first.kill()
