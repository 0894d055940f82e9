"""Requests that clusters make, on a real Slurm whose GPUs are empty files (`Shape.gpus`).

Ranks train on CPUs beside them (`--run.device cpu`). Where a request has 32 ranks, a Python in their place
prints the command: what is tested is what Slurm allocates and what the job script starts.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, commands
from tests.slurm.cluster import Cluster, Shape
from tests.slurm.conftest import need_slurm
from tests.slurm.job import FLAGS
from tests.slurm.test_scripts import INTERACTIVE

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]

CLONED = ("fsdp", "launch", "recipes", "shardrun", "slurm", "tests", "train.py")
SHORT = (*FLAGS, "--train.steps", "2", "--run.device", "cpu", "--watch.enabled", "false")
PYTHON = """#!/bin/sh
# The clone's .venv. The ranks of a job are printed instead of started, if RANKS=printed.
if [ "$RANKS" = printed ]; then
    case " $* " in
    *" launch.node ranks "*) echo "ranks: $*"; mkdir -p "$SHARDRUN_RUN"; : >"$SHARDRUN_RUN/DONE"; exit ;;
    esac
fi
echo "the clone's python: $*" >&2
exec "{python}" "$@"
"""
CONDA = """#!/bin/sh
echo "the python of conda has no torch" >&2
exit 1
"""


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def clone(folder: Path) -> Path:
    """The repository with a .venv of its own."""
    folder.mkdir()
    for name in CLONED:
        if name == "slurm":
            shutil.copytree(ROOT / name, folder / name)
        else:
            (folder / name).symlink_to(ROOT / name)
    executable(folder / ".venv/bin/python", PYTHON.replace("{python}", sys.executable))
    return folder


@dataclass(frozen=True)
class Request:
    """What a person types, and where."""

    words: str
    where: str = "."
    env: Mapping[str, str] = field(default_factory=dict)


def conda(folder: Path) -> dict[str, str]:
    """The variables of a shell in which a conda environment is active."""
    executable(folder / "conda/bin/python", CONDA)
    return {
        "CONDA_PREFIX": str(folder / "conda"),
        "CONDA_DEFAULT_ENV": "base",
        "PATH": f"{folder / 'conda/bin'}:{os.environ['PATH']}",
    }


def requests(folder: Path) -> dict[str, Request]:
    home = folder / "clone"
    gpus_per_task = "--nodes=2 --ntasks-per-node=2 --gpus-per-task=1 slurm/fsdp.sbatch"
    shutil.copy(home / "slurm/fsdp.sbatch", home / "slurm/renamed.slurm")
    (folder / "elsewhere").mkdir()
    shutil.copy(home / "slurm/fsdp.sbatch", folder / "elsewhere/copied.sh")
    return {
        "gpus per task": Request(gpus_per_task),
        "gpus per task, srun": Request(gpus_per_task, env={"LAUNCHER": "srun"}),
        "one GPU a node": Request("--nodes=2 --gpus-per-node=1 slurm/fsdp.sbatch"),
        "in a shell with a GPU": Request("--nodes=2 slurm/fsdp.sbatch", env=INTERACTIVE),
        "conda": Request("--nodes=1 slurm/fsdp.sbatch", env=conda(folder)),
        "renamed": Request(f"--nodes=1 {home}/slurm/renamed.slurm", "elsewhere"),
        "copied": Request("--nodes=1 copied.sh", "elsewhere", {"SHARDRUN_HOME": str(home)}),
        "copied, no home": Request("--nodes=1 copied.sh", "elsewhere"),
        "copied, in the clone": Request(f"--nodes=1 {folder}/elsewhere/copied.sh"),
    }


@dataclass(frozen=True)
class Ended:
    state: str
    log: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Each request's job, all on one cluster of two nodes with two GPUs each."""
    need_slurm()
    folder = tmp_path_factory.mktemp("requests")
    home = clone(folder / "clone")
    with Cluster(folder / "slurm", Shape(nodes=2)) as cluster:
        jobs = {}
        for name, request in requests(folder).items():
            where = folder / request.where if request.where != "." else home
            jobs[name] = cluster.sbatch(*request.words.split(), *SHORT, env=dict(request.env), cwd=where)
        return {name: Ended(cluster.wait(job, 400), cluster.log(job)) for name, job in jobs.items()}


@pytest.mark.parametrize("name", ["gpus per task", "gpus per task, srun"])
def test_gpus_per_task_are_ranks_per_node(ended: dict[str, Ended], name: str) -> None:
    """`--ntasks-per-node=N --gpus-per-task=1`, as most clusters' own examples have it."""
    job = ended[name]
    assert job.state == "COMPLETED", job.log
    assert "2 nodes × 2 ranks on n1 n2" in job.log
    assert "hsdp, replicate 2 × shard 2 = 4 ranks" in job.log


def test_an_active_conda_does_not_hide_the_clones_environment(ended: dict[str, Ended]) -> None:
    job = ended["conda"]
    assert job.state == "COMPLETED", job.log
    assert "the clone's python:" in job.log
    assert "the python of conda" not in job.log


@pytest.mark.parametrize("name", ["renamed", "copied", "copied, in the clone"])
def test_a_renamed_or_copied_job_script_finds_its_clone(ended: dict[str, Ended], name: str) -> None:
    job = ended[name]
    assert job.state == "COMPLETED", job.log
    assert "the clone's python:" in job.log


def test_a_copy_that_finds_no_clone_is_one_line(ended: dict[str, Ended]) -> None:
    job = ended["copied, no home"]
    assert job.state == "FAILED"
    (line,) = job.log.splitlines()[1:]
    assert line.endswith("HINT: export SHARDRUN_HOME=/path/to/shardrun before sbatch")


def test_sbatch_in_a_shell_with_one_gpu_requests_what_it_says(ended: dict[str, Ended]) -> None:
    job = ended["in a shell with a GPU"]
    assert job.state == "COMPLETED", job.log
    assert "2 nodes × 1 ranks on n1 n2" in job.log


# ---------------------------------------------------------------- the README's commands, 32 ranks


def training(page: str) -> str:
    """The page's first sbatch with GPUs that trains a recipe."""
    lines = [line for line in commands(ROOT / page) if line.startswith("sbatch --nodes=4 --gpus-per-node=8")]
    return next(line for line in lines if "--config recipes/" in line)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """The README's job as printed and as its warning advises, and that of docs/first-slurm.md, on four nodes
    with eight GPUs each.
    """
    need_slurm()
    folder = tmp_path_factory.mktemp("large")
    home = clone(folder / "clone")
    printed = training("README.md")
    lines = {
        "printed": printed,
        "advised": printed.replace("slurm/", "--cpus-per-task=32 slurm/"),
        "page": training("docs/first-slurm.md"),
    }
    with Cluster(folder / "slurm", Shape(nodes=4, cpus=32, gpus=8)) as cluster:
        jobs = {
            name: cluster.sbatch(*line.split()[1:], env={"RANKS": "printed"}, cwd=home)
            for name, line in lines.items()
        }
        return {name: Ended(cluster.wait(job, 200), cluster.log(job)) for name, job in jobs.items()}


@pytest.mark.parametrize(("name", "flags"), [("printed", ""), ("page", " --train.global_batch 32")])
def test_a_printed_sbatch_starts_a_rank_for_each_gpu(large: dict[str, Ended], name: str, flags: str) -> None:
    job = large[name]
    assert job.state == "COMPLETED", job.log
    assert "4 nodes × 8 ranks on n1 n2 n3 n4" in job.log
    command = r"^ranks: -m launch\.node ranks --nnodes=4 --nproc-per-node=8 .*"
    started = re.findall(command, job.log, re.MULTILINE)
    assert len(started) == 4
    assert all(f"--config recipes/text.toml{flags}" in line for line in started)


def test_fewer_cpus_than_ranks_are_a_warning_whose_hint_removes_it(large: dict[str, Ended]) -> None:
    """sbatch allocates one CPU a task by default, and the README's job has one task a node."""
    assert "1 CPUs a node for 8 ranks. HINT: sbatch --cpus-per-task=32" in large["printed"].log
    assert large["advised"].state == "COMPLETED", large["advised"].log
    assert "CPUs a node for" not in large["advised"].log


# ---------------------------------------------------------------- by hand, and from a tutorial


def test_python_alone_in_an_allocation_is_a_warning_whose_hint_uses_it_all(
    slurm: Cluster, tmp_path: Path
) -> None:
    train = ["python", "train.py", *SHORT, "--run.dir"]
    alone = slurm.run("salloc", "--nodes=2", *train, str(tmp_path / "alone"), timeout_s=200).stderr
    assert re.search(
        r"one process alone in Slurm job \d+ of 2 nodes and 2 tasks\. HINT: srun python train", alone
    )
    together = slurm.run("salloc", "--nodes=2", "srun", *train, str(tmp_path / "all"), timeout_s=200).stderr
    assert "fsdp, replicate 1 × shard 2 = 2 ranks" in together
    assert "one process alone" not in together
