"""One run directory through Ray, torchrun, sbatch, submitit, a trial of Ray Tune and plain Python.

Each with the command that docs/running.md prints; the losses are those of an unbroken run.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, text_of
from tests.ray.cluster import clean_environment
from tests.slurm.cluster import Cluster, Shape
from tests.slurm.conftest import need_slurm
from tests.slurm.job import Run
from tests.slurm.test_requests import clone

pytestmark = [pytest.mark.slurm, pytest.mark.ray, pytest.mark.slow, pytest.mark.long]

EACH, STEPS = 6, 36
FLAGS = (
    "--data.name", "digits", "--model.name", "mlp", "--train.steps", str(STEPS), "--train.global_batch", "16",
    "--run.log_every_steps", "1", "--run.device", "cpu",
)  # fmt: skip
PROGRAMS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
    "python": [sys.executable],
}


def printed(run: Path) -> list[list[str]]:
    """The commands of the page, with RUN filled in."""
    found = re.findall(
        r"^    (.* --run\.dir RUN --train\.stop_after \d+)$", text_of(ROOT / "docs/running.md"), re.M
    )
    return [shlex.split(command.replace("RUN", str(run))) for command in found]


def trial(run: Path) -> list[str]:
    """The program of docs/library.md that continues a run in a trial."""
    found = re.search(r"(?:^    .*\n|^\n)*^    tune\.Tuner.*\n", text_of(ROOT / "docs/library.md"), re.M)
    assert found is not None
    return ["python", "-c", textwrap.dedent(found[0]).replace("RUN", str(run))]


def typed(words: Sequence[str], home: Path) -> None:
    done = subprocess.run(
        [*PROGRAMS[words[0]], *words[1:]],
        cwd=home,
        env=clean_environment(PYTHONPATH=str(home), HOME=str(home.parent), RAY_USAGE_STATS_ENABLED="0"),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def submitted(words: Sequence[str], home: Path, cluster: Cluster) -> None:
    """With sbatch or launch.submit, to the end of the job."""
    said = cluster.run(*PROGRAMS.get(words[0], [words[0]]), *words[1:], cwd=home, timeout_s=240).stdout
    found = re.search(r"^(?:Submitted batch job|job) +(\d+)", said, re.MULTILINE)
    assert found is not None, said
    assert cluster.wait(found[1], 400) == "COMPLETED", cluster.log(found[1])


def test_one_run_through_every_launcher(tmp_path: Path) -> None:
    need_slurm()
    pytest.importorskip("ray")
    home, place = clone(tmp_path / "clone"), tmp_path / "run"
    ray, torchrun, sbatch, submit, _, alone = printed(place)
    typed([*ray, *FLAGS], home)
    typed(torchrun, home)
    with Cluster(tmp_path / "slurm", Shape(nodes=1)) as cluster:
        submitted(sbatch, home, cluster)
        submitted(submit, home, cluster)
    typed(trial(place), home)
    typed(alone, home)
    typed(
        ["torchrun", "--nproc_per_node=2", "train.py", *FLAGS, "--run.dir", str(tmp_path / "unbroken")], home
    )
    run, unbroken = Run(place), Run(tmp_path / "unbroken").losses
    assert [start["launcher"] for start in run.starts] == [
        "ray",
        "torchrun",
        "torchrun under Slurm",
        "submitit (slurm)",
        "a single process",
        "a single process",
    ]
    assert [start["from_step"] for start in run.starts] == list(range(0, STEPS, EACH))
    assert run.steps == list(range(1, STEPS + 1))
    for step in range(1, 4 * EACH + 1):
        assert run.losses[step] == unbroken[step], "two ranks: the same bits"
    assert run.losses == pytest.approx(unbroken, abs=1e-5)
