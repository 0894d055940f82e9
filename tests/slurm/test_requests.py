"""Requests that clusters make, on a real Slurm whose GPUs are empty files (`Shape.gpus`).

Ranks train on CPUs beside them (`--run.device cpu`). Where a request has 32 ranks, a Python in their place
prints the command: what is tested is what Slurm allocates and what the job script starts.
"""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
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


def requests() -> dict[str, tuple[str, dict[str, str]]]:
    """What a person types, and in which environment."""
    gpus_per_task = "--nodes=2 --ntasks-per-node=2 --gpus-per-task=1 slurm/fsdp.sbatch"
    return {
        "gpus per task": (gpus_per_task, {}),
        "in a shell with a GPU": ("--nodes=2 slurm/fsdp.sbatch", INTERACTIVE),
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
        jobs = {
            name: cluster.sbatch(*words.split(), *SHORT, env=env, cwd=home)
            for name, (words, env) in requests().items()
        }
        return {name: Ended(cluster.wait(job, 400), cluster.log(job)) for name, job in jobs.items()}


def test_gpus_per_task_are_ranks_per_node(ended: dict[str, Ended]) -> None:
    """`--ntasks-per-node=N --gpus-per-task=1`, as most clusters' own examples have it."""
    job = ended["gpus per task"]
    assert job.state == "COMPLETED", job.log
    assert "2 nodes × 2 ranks on n1 n2" in job.log
    assert "hsdp, replicate 2 × shard 2 = 4 ranks" in job.log


def test_sbatch_in_a_shell_with_one_gpu_requests_what_it_says(ended: dict[str, Ended]) -> None:
    job = ended["in a shell with a GPU"]
    assert job.state == "COMPLETED", job.log
    assert "2 nodes × 1 ranks on n1 n2" in job.log


# ---------------------------------------------------------------- the README's commands, 32 ranks


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
