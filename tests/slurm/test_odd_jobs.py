"""No environment, folders with a space, a cancel while ranks start, two jobs on one run directory at once, a
requeue onto fewer nodes, an array of a moved and renamed job script. All on one cluster.
"""

from __future__ import annotations

import shlex
import shutil
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


def test_a_job_that_a_task_of_an_array_submits_has_its_own_number_and_processors(place: Place) -> None:
    """sbatch gives it the variables of that task, and the user's shell may set one of srun."""
    run, number = place.folder / "submitted run", place.folder / "submitted"
    flags = shlex.join(["--run.dir", str(run), *SHORT])
    words = "--parsable --nodes=1 --ntasks-per-node=2 slurm/fsdp.sbatch"
    script = place.folder / "submits.sh"
    script.write_text(f"#!/bin/bash\nsbatch {words} {flags} >{shlex.quote(str(number))}\n")
    env = {"LAUNCHER": "srun", "SRUN_CPUS_PER_TASK": "8", "SLURM_LABELIO": "1"}
    outer = place.cluster.sbatch("--array=7", "--nodes=1", str(script), env=env, cwd=place.home)
    assert place.cluster.wait(f"{outer}_7", END_S) == "COMPLETED"
    job = Job(place.cluster, number.read_text().strip(), Run(run))
    assert job.wait(END_S) == "COMPLETED", job.log()
    assert job.run.steps == [1, 2, 3]
    assert f"slurm: job {job.id} (" in job.log()


def test_each_task_of_an_array_of_a_moved_and_renamed_script_trains(place: Place) -> None:
    script = place.folder / "my jobs" / "train my model.sh"
    script.parent.mkdir()
    shutil.copy(place.home / "slurm/fsdp.sbatch", script)
    words = ["--array=3,5", "--nodes=1", str(script), *SHORT]
    env = {"SHARDRUN_HOME": str(place.home)}
    job = place.cluster.sbatch(*words, env=env, cwd=script.parent)
    for task in (3, 5):
        run = Run(script.parent / "runs" / f"shardrun-{job}_{task}")
        state = place.cluster.wait(f"{job}_{task}", END_S)
        assert state == "COMPLETED", place.cluster.log(f"{job}_{task}")
        assert run.steps == [1, 2, 3]
