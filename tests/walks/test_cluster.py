"""The first hour of a cluster user, with what docs/slurm.md says alone: three nodes, cluster.env with hooks,
a container with an environment of its own, a node that a health check finds broken, an array, a dry run.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, Shape
from tests.slurm.conftest import need_slurm
from tests.slurm.job import FLAGS, Run
from tests.slurm.test_requests import clone, executable
from tests.support.processes import eventually

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SHORT = (*FLAGS, "--train.steps", "8", "--checkpoint.every_steps", "4")
APPTAINER = r"""#!/bin/bash
# As apptainer runs a command: `exec [OPTIONS] IMAGE COMMAND…`, with --cleanenv in an environment of its own.
while [[ $1 != *.sif ]]; do shift; done
exec env -i "HOME=$HOME" "PATH=$PATH" IMAGE="$1" "${@:2}"
"""
SETTINGS = """
CONTAINER=(apptainer exec --nv --cleanenv --bind /shared /shared/images/shardrun.sif)
before_job() { echo "job $SLURM_JOB_ID" >>"$PLACE/before"; }
before_node() { timeout 60 test "$(hostname)" != n2 && touch "$PLACE/staged-$(hostname)"; }
TORCHRUN_ARGS=(--monitor-interval=0.2)
COMMENT_S=1
"""


def test_a_cluster_user_s_first_hour(tmp_path: Path) -> None:
    need_slurm()
    home = clone(tmp_path / "shardrun")
    bin_folder = executable(tmp_path / "bin" / "apptainer", APPTAINER).parent
    with (home / "slurm" / "cluster.env").open("a") as file:
        file.write(SETTINGS.replace("$PLACE", str(tmp_path)))
    with Cluster(tmp_path / "slurm", Shape(nodes=3, gpus=0)) as cluster:
        env = {"PATH": f"{bin_folder}:{cluster.environment()['PATH']}", "SLOW_S": "0.4"}

        def sbatch(*words: str) -> str:
            return cluster.sbatch(*words, env=env, cwd=home)

        script = "slurm/fsdp.sbatch"
        job = sbatch("--nodes=2", script, *SHORT)
        rates = ["--optim.lr", "{task}e-3", "--train.steps", "4"]
        array = sbatch("--array=1-2", "--nodes=1", script, *SHORT, *rates)
        # `squeue` shows the step while it trains
        step = r"start 2, step [1-8] of 8"
        shown = lambda: re.search(step, cluster.run("squeue", "-h", "-o", "%k").stdout)  # noqa: E731
        eventually("a step in squeue", shown, 90, lambda: cluster.log(job))
        assert cluster.wait(job, 200) == "COMPLETED", cluster.log(job)
        log, facts, run = cluster.log(job), cluster.job(job), Run(home / "runs" / f"shardrun-{job}")
        # the node whose hook failed is left out at the requeue
        assert f"requeued {job}, without n2" in log
        assert (facts["ExcNodeList"], facts["Restarts"]) == ("n2", "1")
        assert facts["Comment"].strip() == "done: the run has all its steps."
        assert [sorted(start["nodes"]) for start in run.starts] == [["n1", "n3"]]
        assert run.steps == list(range(1, 9))
        assert {path.name for path in tmp_path.glob("staged-*")} == {"staged-n1", "staged-n3"}
        assert (tmp_path / "before").read_text().count(f"job {job}\n") == 2
        # the array's tasks differ by their flag
        for task in (1, 2):
            assert cluster.wait(f"{array}_{task}", 200) == "COMPLETED", cluster.log(f"{array}_{task}")
            text = (home / "runs" / f"shardrun-{array}_{task}" / "config.toml").read_text()
            assert re.search(rf"^lr = 0\.00{task}$", text, re.MULTILINE), text
        # what would run is printed: each node, both commands, train.py's own report
        check = sbatch("--nodes=2", "--exclude=n2", script, *SHORT, "--dry-run")
        assert cluster.wait(check) == "COMPLETED", cluster.log(check)
        printed = cluster.log(check)
        for line in (r"^n1: 1 ranks on cpu", r"^n3: 1 ranks on cpu", "would run: srun .*train.py"):
            assert re.search(line, printed, re.MULTILINE), printed
        torchrun = r"torchrun --nnodes=2 --node-rank=0 .*--monitor-interval=0\.2 \S+/train\.py"
        assert re.search(torchrun, printed), printed
