"""shardrun.train in one's own TorchTrainer: an empty run.dir is the storage of its RunConfig."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import s3_server
from tests.checkpoint.conftest import server
from tests.checkpoint.test_store_alone import losses, records, url
from tests.ray.cluster import REPOSITORY, Cluster
from tests.ray.runs import Run

__all__ = ["server", "url"]
pytestmark = pytest.mark.ray

PROGRAM = """
import json
import os
import sys
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def work(flags):
    if flags["loop"] == "train":
        import shardrun
        shardrun.train(flags["flags"])
    else:
        from examples import own_loop
        sys.argv[1:] = flags["flags"]
        own_loop.main()

# workers of a cluster have the environment of their node: there the package is installed, and keys are set
own = ("PYTHONPATH", "XDG_CACHE_HOME", "AWS_")
ray.init(runtime_env={"env_vars": {name: os.environ[name] for name in os.environ if name.startswith(own)}})
result = TorchTrainer(
    work,
    train_loop_config={"loop": sys.argv[1], "flags": sys.argv[3:]},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=sys.argv[2], name="mine"),
).fit()
print("RESULT", json.dumps([[one.path for one, _ in result.best_checkpoints], result.metrics]))
"""
FLAGS = ("--model.name", "mlp", "--train.global_batch", "16", "--run.log_every_steps", "1")


def trained(
    cluster: Cluster, folder: Path, storage: str, *flags: str, loop: str = "train", **variables: str
) -> tuple[list[str], dict[str, Any]]:
    """The checkpoints of Ray's Result, and its metrics."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, loop, storage, *flags],
        cwd=folder,
        text=True,
        env=cluster.environment(RAY_ADDRESS=cluster.address, PYTHONPATH=str(REPOSITORY), **variables),
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = done.stdout.rpartition("RESULT ")[2].partition("\n")[0]
    checkpoints, metrics = json.loads(line)
    return checkpoints, metrics


@pytest.mark.long
@pytest.mark.slow
def test_a_trainer_of_ones_own_trains_and_continues_in_its_storage(tmp_path: Path, joined: Cluster) -> None:
    """More checkpoints than are kept: Ray does not start where its list names one that is gone."""
    run = Run(tmp_path / "storage" / "mine")
    kept = ("--checkpoint.every_steps", "1", "--checkpoint.keep_last", "2")
    for steps in (4, 6):
        checkpoints, metrics = trained(
            joined, tmp_path, str(run.path.parent), *FLAGS, *kept, "--train.steps", str(steps)
        )
        folder = run.path / "checkpoints"
        assert checkpoints == [str(folder / f"step-{step:08}") for step in (steps - 1, steps)]
        assert sorted(map(str, folder.glob("step-*"))) == checkpoints
        assert metrics["step"] == steps
    assert run.steps == [1, 2, 3, 4, 5, 6]
    assert [start["from_step"] for start in run.starts] == [0, 4]


@pytest.mark.long
@pytest.mark.slow
def test_a_loop_of_ones_own_reports_to_ray_and_keeps_a_run_directory_outside_its_storage(
    tmp_path: Path, joined: Cluster
) -> None:
    storage = str(tmp_path / "storage")
    checkpoints, metrics = trained(joined, tmp_path, storage, "--train.steps", "6", loop="own")
    assert checkpoints == [f"{storage}/mine/checkpoints/step-00000006"]
    assert metrics["step"] == 6
    assert {"loss", "grad_norm"} <= metrics.keys()
    flags = ("--checkpoint.every_steps", "1", "--run.dir", str(tmp_path / "run"), "--train.steps", "3")
    assert trained(joined, tmp_path, storage, *FLAGS, *flags)[0] == []
    assert Run(tmp_path / "run").steps == [1, 2, 3]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.needs("s3")
def test_a_trainer_whose_storage_is_a_url_saves_there_and_continues_on_another_machine(
    server: str, url: str, tmp_path: Path, joined: Cluster
) -> None:
    store, storage = {**s3_server.KEYS, "AWS_ENDPOINT_URL": server}, url.removesuffix("/a")
    checkpoints_url = f"{storage}/mine/checkpoints"
    for steps in ("4", "6"):
        cache, flags = str(tmp_path / steps), (*FLAGS, "--train.steps", steps)
        checkpoints, metrics = trained(joined, tmp_path, storage, *flags, **store, XDG_CACHE_HOME=cache)
        newest = f"{checkpoints_url}/step-0000000{steps}".removeprefix("s3://")
        assert checkpoints[-1].startswith(newest)
        assert metrics["checkpoint"].startswith(f"s3://{newest}")
    assert set(losses(records(checkpoints_url, "metrics.jsonl"))) == {1, 2, 3, 4, 5, 6}
    starts = [one for one in records(checkpoints_url, "history.jsonl") if one["event"] == "start"]
    assert [start["from_step"] for start in starts] == [0, 4]
