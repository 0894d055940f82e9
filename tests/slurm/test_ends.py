"""Ends of the table in docs/restarts.md on a real Slurm: what followed, and the job's exit code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp.rundir import paths
from fsdp.rundir.lock import FolderLock
from tests.launch.ends import ENDS, LAUNCHERS, flags_of, sequence
from tests.slurm.cluster import Cluster, Shape
from tests.slurm.conftest import need_slurm
from tests.slurm.job import Job, Run, sbatch
from tests.slurm.scenarios import Left, left, submit

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]

REFUSED = "a run directory that another job writes"
BOTH = ("an exception of your own code", "out of memory", "a killed rank", "a rank that hangs")
NAMES = {
    "sbatch": BOTH,
    "LAUNCHER=srun sbatch": (*BOTH, "a wrong flag or mesh"),
    "launch.submit": (*BOTH, "numbers that are not finite", REFUSED),
}
"""What tests/slurm/test_jobs.py leaves out."""
CASES = [(launcher, name) for launcher, names in NAMES.items() for name in names]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    need_slurm()
    with Cluster(tmp_path_factory.mktemp("ends"), Shape(nodes=2)) as one:
        yield one


@pytest.fixture(scope="module")
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cluster: Cluster
) -> dict[tuple[str, str], Left]:
    """The jobs of the selected tests, submitted together."""
    selected = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params for item in selected if isinstance(item, pytest.Function)]
    folder = tmp_path_factory.mktemp("jobs")
    held, jobs = [], {}
    for number, case in enumerate(cases):
        launcher, name = str(case["launcher"]), str(case["name"])
        run = folder / f"run-{number}"
        if name == REFUSED:
            held.append(FolderLock.acquire(paths.create(run).path, "torchrun"))
        jobs[launcher, name] = submitted(cluster, launcher, run, [*flags_of(name), "--run.dir", str(run)])
    try:
        return {case: left(job) for case, job in jobs.items()}
    finally:
        for lock in held:
            lock.release()


def submitted(cluster: Cluster, launcher: str, run: Path, flags: list[str]) -> Job:
    folder = run.with_name(f"{run.name}-job")
    if launcher == "launch.submit":
        job = submit(cluster, folder, "--nodes=1", "--tasks-per-node=2", flags=flags)
    else:
        env = {"LAUNCHER": "srun"} if "srun" in launcher else {}
        job = sbatch(cluster, folder, "--nodes=1", ranks=2, flags=flags, env=env)
    return Job(cluster, job.id, Run(run))


@pytest.mark.parametrize(("launcher", "name"), CASES)
def test_what_follows(ended: dict[tuple[str, str], Left], launcher: str, name: str) -> None:
    job = ended[launcher, name]
    acts, code = sequence(ENDS[name], LAUNCHERS[launcher])
    assert (job.state, job.code) == ("FAILED", code), job.log
    values = [act.value for act in acts]
    assert job.restarts == values.count("requeue"), job.log
    started = 0 if name in (REFUSED, "a wrong flag or mesh") else len(acts)
    assert len(job.run.starts) == started, job.log
