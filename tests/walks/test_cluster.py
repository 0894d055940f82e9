"""The first hour of a cluster user, with what docs/slurm.md says alone: three nodes, cluster.env with hooks,
a container with an environment of its own, a node that a health check finds broken, an array, a dry run.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
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
before_node() { [ "$(hostname)" != n2 ] || sleep 600; touch "$PLACE/staged-$(hostname)"; }
HOOK_TIMEOUT_S=5
TORCHRUN_ARGS=(--monitor-interval=0.2)
COMMENT_S=1
"""

CHARLIECLOUD = """
CONTAINER=(ch-run --unset-env='*' --set-env=IMAGE=mine --set-env=PATH={path} {binds} {image} --)
before_job() {{ [ "$SLURM_JOB_NAME" != refused ] || return 7; }}
"""


def image(folder: Path) -> str:
    """A root of its own for ch-run, which sees the folders of Python, the code and the runs."""
    tops = {Path(path).resolve().parts[1] for path in (sys.prefix, sys.base_prefix, ROOT, folder, "/usr")}
    tops -= {"tmp"}  # ch-run mounts it
    for name in {"dev", "proc", "sys", "etc", "home", "tmp"} | tops:
        (folder / "image" / name).mkdir(parents=True)
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (folder / "image/etc" / name).touch()
    for name in ("bin", "lib", "lib64"):
        (folder / "image" / name).symlink_to(f"usr/{name}")
    path, binds = f"{Path(sys.executable).parent}:/usr/bin", " ".join(f"--bind /{top}" for top in tops)
    return CHARLIECLOUD.format(path=path, binds=binds, image=folder / "image")


@pytest.mark.needs("charliecloud")
def test_in_a_container_with_a_root_an_environment_and_a_folder_of_its_own(tmp_path: Path) -> None:
    need_slurm()
    home = clone(tmp_path / "shardrun")
    with (home / "slurm" / "cluster.env").open("a") as file:
        file.write(image(tmp_path))
    with Cluster(tmp_path / "slurm", Shape(nodes=2, gpus=0)) as cluster:

        def sbatch(name: str) -> str:
            words = ("--nodes=2", f"--job-name={name}", "slurm/fsdp.sbatch", *SHORT)
            return cluster.sbatch(*words, env={"USER": "me"}, cwd=home)

        job, refused = sbatch("mine"), sbatch("refused")
        assert cluster.wait(job, 200) == "COMPLETED", cluster.log(job)
        run = Run(home / "runs" / f"mine-{job}")
        assert (run.steps, run.starts[0]["nodes"]) == (list(range(1, 9)), ["n1", "n2"])
        log = cluster.log(job)
        assert not re.search(r"Killed|No such file", log), log
        assert cluster.wait(refused) == "FAILED"
        assert "\nn1: before_job ended with 7\n" in cluster.log(refused)


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
        # the node whose hook hangs is named, and left out at the requeue
        late = "n2: before_node ended with 124: not done within HOOK_TIMEOUT_S=5 seconds\n"
        assert (late in log, f"requeued {job}, without n2" in log) == (True, True), log
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
