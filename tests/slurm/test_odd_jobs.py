"""No environment, folders with a space, a cancel while ranks start, two jobs on one run directory at once, a
requeue onto fewer nodes, an array of a moved and renamed job script. All on one cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, Shape
from tests.slurm.conftest import need_slurm
from tests.slurm.job import FLAGS, Job, Run
from tests.slurm.scenarios import SLOWLY
from tests.slurm.test_requests import clone
from tests.support.processes import eventually

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]

END_S = 400.0
SHORT = (*FLAGS, "--train.steps", "3", "--watch.enabled", "false")


@dataclass(frozen=True)
class Place:
    """A cluster, and a clone in a folder whose name has a space."""

    cluster: Cluster
    home: Path
    folder: Path

    def submit(
        self, *words: str, run: str, flags: Sequence[str] = SHORT, env: Mapping[str, str] = SLOWLY
    ) -> Job:
        place = self.folder / run
        options = [*words, "--run.dir", str(place), *flags]
        return Job(self.cluster, self.cluster.sbatch(*options, env=env, cwd=self.home), Run(place))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    need_slurm()
    folder = tmp_path_factory.mktemp("odd")
    home = clone(folder / "my clone")
    with Cluster(folder / "slurm", Shape(nodes=3)) as cluster:
        yield Place(cluster, home, folder)


@pytest.mark.parametrize("export", ["NONE", "LAUNCHER=srun"])
def test_a_job_without_the_environment_of_the_shell_trains(place: Place, export: str) -> None:
    """Sites that recommend `--export=NONE`: Slurm then gives it to each srun of the job too."""
    job = place.submit(f"--export={export}", "--nodes=2", "slurm/fsdp.sbatch", run=f"export {export}")
    assert job.wait(END_S) == "COMPLETED", job.log()
    assert job.run.steps == [1, 2, 3]
    launcher = "srun" if export != "NONE" else "torchrun under Slurm"
    assert [start["launcher"] for start in job.run.starts] == [launcher]
    assert "[c10d]" not in job.log(), "a warning for each host name that does not resolve"
    assert "done: the run has all its steps." in job.log()


def test_a_cancel_while_the_ranks_start_ends_the_job(place: Place) -> None:
    """Ranks that do not train yet ignore SIGTERM, so Slurm ends them after KillWait."""
    flags = (*SHORT, "--train.steps", "1000000")
    job = place.submit("--nodes=2", "slurm/fsdp.sbatch", run="cancelled", flags=flags)
    eventually("the ranks start", lambda: " reach " in job.log(), END_S, job.log)
    place.cluster.run("scancel", job.id)
    assert job.wait(END_S) == "CANCELLED", job.log()
    assert place.cluster.job(job.id)["Restarts"] == "0"
    assert "Traceback" not in job.log()
    assert [event for event in job.run.history if event["event"] == "crash"] == [], job.log()
