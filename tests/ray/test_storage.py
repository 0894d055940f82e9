"""shardrun.train in one's own TorchTrainer: an empty run.dir is the storage of its RunConfig."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

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
import os
import sys
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def work(flags):
    import shardrun
    shardrun.train(flags["flags"])

# workers of a cluster have the environment of their node: there the package is installed, and keys are set
own = ("PYTHONPATH", "XDG_CACHE_HOME", "AWS_")
ray.init(runtime_env={"env_vars": {name: os.environ[name] for name in os.environ if name.startswith(own)}})
TorchTrainer(
    work,
    train_loop_config={"flags": sys.argv[2:]},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=sys.argv[1], name="mine"),
).fit()
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


def trained(cluster: Cluster, folder: Path, storage: str, steps: str, **variables: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, storage, *FLAGS, "--train.steps", steps],
        cwd=folder,
        text=True,
        env=cluster.environment(RAY_ADDRESS=cluster.address, PYTHONPATH=str(REPOSITORY), **variables),
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_a_trainer_of_ones_own_trains_and_continues_in_its_storage(tmp_path: Path, joined: Cluster) -> None:
    run = Run(tmp_path / "storage" / "mine")
    for steps in ("4", "6"):
        trained(joined, tmp_path, str(tmp_path / "storage"), steps)
    assert run.steps == [1, 2, 3, 4, 5, 6]
    assert [start["from_step"] for start in run.starts] == [0, 4]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.needs("s3")
def test_a_trainer_whose_storage_is_a_url_continues_on_other_machines(
    server: str, url: str, tmp_path: Path, joined: Cluster
) -> None:
    store = {**s3_server.KEYS, "AWS_ENDPOINT_URL": server}
    for steps in ("4", "6"):
        trained(
            joined, tmp_path, url.removesuffix("/a"), steps, **store, XDG_CACHE_HOME=str(tmp_path / steps)
        )
    run = url.removesuffix("/a") + "/mine"
    assert set(losses(records(run, "metrics.jsonl"))) == {1, 2, 3, 4, 5, 6}
    starts = [one for one in records(run, "history.jsonl") if one["event"] == "start"]
    assert [start["from_step"] for start in starts] == [0, 4]
