"""Jobs whose run directory is in an object store: one begins, another on other machines continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint import s3_server
from tests.checkpoint.conftest import server
from tests.checkpoint.test_run_in_store import losses, records, url
from tests.slurm.cluster import Cluster, Shape
from tests.slurm.conftest import need_slurm
from tests.slurm.job import FLAGS

__all__ = ["server", "url"]
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long, pytest.mark.needs("s3")]

END_S = 400.0


def test_a_job_continues_what_another_began_on_other_machines(server: str, url: str, tmp_path: Path) -> None:
    """Nodes share no folder of the run: each job has a cache of its own."""
    need_slurm()
    store = {**s3_server.KEYS, "AWS_ENDPOINT_URL": server}
    # Nodes in network namespaces of their own would not reach a server on the loopback.
    with Cluster(tmp_path / "slurm", Shape(nodes=2), "local") as cluster:
        for launcher, steps in (("torchrun", "10"), ("srun", "20")):
            env = {**store, "LAUNCHER": launcher, "XDG_CACHE_HOME": str(tmp_path / launcher)}
            more = ("--run.dir", url, "--train.stop_after" if steps == "10" else "--train.steps", steps)
            log = f"--output={tmp_path}/%j.log"
            job = cluster.sbatch("--nodes=2", log, "slurm/fsdp.sbatch", *FLAGS, *more, env=env)
            assert cluster.wait(job, END_S) == "COMPLETED", cluster.log(job)
    assert set(losses(records(url, "metrics.jsonl"))) == set(range(1, 21)), cluster.log(job)
    starts = [one for one in records(url, "history.jsonl") if one["event"] == "start"]
    assert [(one["from_step"], one["launcher"]) for one in starts] == [
        (0, "torchrun under Slurm"),
        (10, "srun"),
    ]
