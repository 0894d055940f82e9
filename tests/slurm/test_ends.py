"""How starts end on Slurm: what follows and the job's exit code, as docs/restarts.md has them.

The jobs of all selected cells share one cluster, which runs a few of them at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from fsdp.rundir import history
from launch.policy import Act
from tests.launch.ends import DEADLINE, ENDS, LAUNCHERS, ON_SLURM, REFUSED, SRUN, STOPPED, flags_of, sequence
from tests.slurm.cluster import Cluster, Shape
from tests.slurm.conftest import need_slurm
from tests.slurm.job import Job, Run, sbatch
from tests.slurm.scenarios import submit
from tests.support.locks import acquire

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]

Cell = tuple[str, str]
END_S = 1200.0
"""For the jobs in front of it in the queue too."""


def submitted(cluster: Cluster, folder: Path, cell: Cell) -> Job:
    name, launcher = cell
    run = folder / "run"
    flags = [*flags_of(name), "--run.dir", str(run), "--run.device", "cpu"]
    if launcher == "launch.submit":
        job = submit(cluster, folder, "--nodes=1", "--tasks-per-node=2", flags=flags)
    else:
        mode = {"LAUNCHER": "srun"} if launcher == SRUN else None
        job = sbatch(cluster, folder, "--nodes=1", ranks=2, flags=flags, env=mode)
    return Job(cluster, job.id, Run(run))


@pytest.fixture(scope="module")
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[Cell, Job]]:
    """The jobs of the selected cells, submitted together; two jobs of two ranks run at a time."""
    need_slurm()
    cells = (params_of(item).get("cell") for item in request.session.items)
    selected: list[Cell] = [cell for cell in cells if cell is not None]
    folder = tmp_path_factory.mktemp("ends")
    with contextlib.ExitStack() as stack:
        for at, (name, _) in enumerate(selected):
            if name == REFUSED:
                lock = acquire(history.create(folder / str(at) / "run").path, "torchrun")
                stack.callback(lock.release)
        cluster = stack.enter_context(Cluster(folder / "slurm", Shape(nodes=2, cpus=2, message_timeout_s=60)))
        yield {cell: submitted(cluster, folder / str(at), cell) for at, cell in enumerate(selected)}


def params_of(item: pytest.Item) -> Mapping[str, Cell]:
    return item.callspec.params if hasattr(item, "callspec") else {}


@pytest.mark.parametrize("cell", ON_SLURM, ids=" - ".join)
def test_what_follows_on_slurm(cell: Cell, jobs: Mapping[Cell, Job]) -> None:
    (name, launcher), job = cell, jobs[cell]
    if name in (STOPPED, DEADLINE):
        stopped(job, name)
        return
    acts, code = sequence(ENDS[name], LAUNCHERS[launcher])
    assert job.wait(END_S) == "FAILED", job.log()
    facts = job.cluster.job(job.id)
    assert facts["ExitCode"] == f"{code}:0", job.log()
    assert int(facts["Restarts"]) == acts.count(Act.REQUEUE), job.log()
    never = name in (REFUSED, "a wrong flag or mesh")
    assert len(job.run.starts) == (0 if never else len(acts)), job.log()


def stopped(job: Job, name: str) -> None:
    """A cancelled job has saved; one at its deadline has saved and is requeued."""
    if name == STOPPED:
        job.until_step(1, END_S)
    else:
        # Slurm does not cancel a job that is completing, and requeues it after: cancelled just after a start.
        job.until_start(max(2, len(job.run.starts) + 1), END_S)
    job.cluster.run("scancel", job.id)
    assert job.wait() == "CANCELLED", job.log()
    assert (int(job.cluster.job(job.id)["Restarts"]) > 0) == (name == DEADLINE), job.log()
    assert job.run.ends[0] == ("SIGTERM" if name == STOPPED else "the deadline")
    steps = [int(path.name.removeprefix("step-")) for path in (job.run.path / "checkpoints").glob("step-*")]
    assert max(steps) == max(job.run.steps), "the last step has a checkpoint"
