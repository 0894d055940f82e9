"""shardrun.train in one's own TorchTrainer: an empty run.dir is the storage of its RunConfig."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from launch import in_process
from tests.checkpoint import s3_server
from tests.checkpoint.conftest import server
from tests.checkpoint.test_run_in_store import losses, records, url
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


def stored(monkeypatch: pytest.MonkeyPatch, kind: str, path: str) -> None:
    import ray.train

    system = types.SimpleNamespace(type_name=kind)
    storage = types.SimpleNamespace(storage_filesystem=system, experiment_fs_path=path)
    context = types.SimpleNamespace(get_storage=lambda: storage)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)


@pytest.mark.long
def test_a_folder_is_the_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    stored(monkeypatch, "local", "/shared/runs/mine")
    assert in_process._run_dir_of_storage() == "/shared/runs/mine"


def test_a_url_of_an_object_store_is_the_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    stored(monkeypatch, "gcs", "bucket/runs/mine")
    assert in_process._run_dir_of_storage() == "gs://bucket/runs/mine"


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
def test_a_run_directory_outside_ray_s_storage_keeps_its_checkpoints(tmp_path: Path, joined: Cluster) -> None:
    flags = ("--checkpoint.every_steps", "1", "--run.dir", str(tmp_path / "run"), "--train.steps", "3")
    assert trained(joined, tmp_path, str(tmp_path / "storage"), *FLAGS, *flags)[0] == []
    assert Run(tmp_path / "run").steps == [1, 2, 3]


@pytest.mark.long
@pytest.mark.slow
def test_a_loop_of_ones_own_reports_to_ray(tmp_path: Path, joined: Cluster) -> None:
    storage = str(tmp_path / "storage")
    checkpoints, metrics = trained(joined, tmp_path, storage, "--train.steps", "6", loop="own")
    assert checkpoints == [f"{storage}/mine/checkpoints/step-00000006"]
    assert metrics["step"] == 6
    assert {"loss", "grad_norm"} <= metrics.keys()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.needs("s3")
def test_a_trainer_whose_storage_is_a_url_continues_on_other_machines(
    server: str, url: str, tmp_path: Path, joined: Cluster
) -> None:
    store = {**s3_server.KEYS, "AWS_ENDPOINT_URL": server}
    for steps in ("4", "6"):
        cache = str(tmp_path / steps)
        storage = url.removesuffix("/a")
        trained(joined, tmp_path, storage, *FLAGS, "--train.steps", steps, **store, XDG_CACHE_HOME=cache)
    run = url.removesuffix("/a") + "/mine"
    assert set(losses(records(run, "metrics.jsonl"))) == {1, 2, 3, 4, 5, 6}
    starts = [one for one in records(run, "history.jsonl") if one["event"] == "start"]
    assert [start["from_step"] for start in starts] == [0, 4]
