"""slurm/ray.sbatch on a real Slurm: a Ray cluster on two nodes, asked to stop in the first start, done in the
second.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ray.runs import FLAGS, HSDP, SLOWLY, STEPS, torchrun
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import need_slurm
from tests.slurm.job import sbatch

pytestmark = [pytest.mark.ray, pytest.mark.slurm, pytest.mark.slow]


@pytest.mark.long
def test_stopped_by_the_scheduler_it_is_requeued_and_ends_with_torchruns_losses(tmp_path: Path) -> None:
    need_slurm()
    before = set(Path("/tmp").glob("ray-*"))
    with Cluster(tmp_path / "slurm") as cluster:
        job = sbatch(cluster, tmp_path / "job", script="ray", ranks=2, flags=[*FLAGS, *SLOWLY])
        job.until_step(5, 240)
        # what --signal=B:USR1@120 does before the time limit
        cluster.run("scancel", "--signal=USR1", "--batch", job.id)
        assert job.wait(400) == "COMPLETED", job.log()
        assert cluster.job(job.id)["Restarts"] == "1"
        log = job.log()
    assert set(Path("/tmp").glob(f"ray-{job.id}-*")) <= before, "what Ray wrote on the head is gone"
    assert "stopped: SIGUSR1. To be requeued." in log
    assert [sorted(start["nodes"]) for start in job.run.starts] == [["n1", "n2"], ["n1", "n2"]]
    assert job.run.starts[1]["from_step"] >= 5
    assert job.run.steps == list(range(1, STEPS + 1))
    assert job.run.losses == torchrun(tmp_path / "torchrun", 4, *HSDP).losses
