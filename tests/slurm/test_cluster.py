"""The Slurm of the other tests: it starts in seconds, two are independent, and nothing of it remains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import REPOSITORY, Cluster, Mode, Shape, best_mode
from tests.slurm.conftest import need_slurm
from tests.support.processes import eventually, pids_with

pytestmark = pytest.mark.slurm

MODES: list[Mode] = ["netns", "local"]


def cluster(folder: Path, mode: Mode, nodes: int = 2) -> Cluster:
    need_slurm()
    if mode == "netns" and best_mode() != "netns":
        pytest.skip("namespaces need root")
    return Cluster(folder, Shape(nodes=nodes), mode)


def links() -> str:
    return subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("mode", MODES)
def test_up_runs_a_job_and_leaves_nothing(tmp_path: Path, mode: Mode) -> None:
    before = links()
    started = time.monotonic()
    with cluster(tmp_path / "slurm", mode) as slurm:
        assert time.monotonic() - started < 60
        hosts = slurm.run("srun", "-N2", "-l", "bash", "-c", "echo $SLURMD_NODENAME").stdout.splitlines()
        assert sorted(hosts) == ["0: n1", "1: n2"]
        job = slurm.sbatch("--output", str(tmp_path / "log"), "--wrap", "srun sleep 600")
        eventually("the job runs", lambda: slurm.state(job) == "RUNNING", 60)
    eventually("all its processes ended", lambda: not pids_with(f"SLURM_CONF={slurm.conf}"), 60)
    assert links() == before


def test_a_node_loses_its_power_and_comes_back(tmp_path: Path, netns: None) -> None:
    with cluster(tmp_path / "slurm", "netns") as slurm:
        job = slurm.sbatch("-N1", "-w", "n2", "--output", "/dev/null", "--wrap", "sleep 600")
        eventually("it runs on n2", lambda: slurm.pids("n2", f"SLURM_JOB_ID={job}"), 60)
        slurm.power_off("n2")
        eventually(
            "all on n2 ended", lambda: not pids_with(f"SLURM_CONF={slurm.conf}", f"SLURM_JOB_ID={job}"), 60
        )
        slurm.power_on("n2")
        eventually(
            "n2 works again",
            lambda: "n2" in slurm.run("srun", "-w", "n2", "hostname", check=False).stdout,
            60,
        )


def test_a_killed_test_run_leaves_no_cluster(tmp_path: Path, netns: None) -> None:
    """SIGKILL runs no clean-up: the cluster must end by itself."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.slurm.cluster"],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert "up" in process.stdout.readline()
        (conf,) = tmp_path.glob("slurm-*/slurm.conf")
        assert pids_with(f"SLURM_CONF={conf}")
        process.send_signal(signal.SIGKILL)
    eventually("all its processes ended", lambda: not pids_with(f"SLURM_CONF={conf}"), 60)
