"""Runs inside a Ray cluster that was there before: the same losses, the words once, checkpoints ours, killed
workers back.

All that share the cluster stand in this file: another one would be another process of pytest, with a cluster
of its own.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
from pathlib import Path

import pytest

from fsdp.checkpoint import inspect
from fsdp.checkpoint.store import open_store
from tests.ray.cluster import Cluster
from tests.ray.runs import EVERY, HSDP, SLOWLY, STEPS, Driver, Run, check_whole, rank_pid, torchrun

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory, joined: Cluster) -> Driver:
    """A run inside a cluster that was there before, to its end."""
    driver = Driver(tmp_path_factory.mktemp("joined") / "run", "--checkpoint.keep_last", "2", cluster=joined)
    driver.finish()
    return driver


def test_progress_is_shown_once_and_retention_is_ours(driver: Driver) -> None:
    lines, run = driver.out.splitlines(), driver.run
    assert [line.split()[1] for line in lines if line.startswith("step")] == [
        f"{step}/{STEPS}" for step in range(1, STEPS + 1)
    ]
    assert sum(line.startswith("finished at step") for line in lines) == 1
    assert any(line.startswith("eval_loss") for line in lines)
    assert "(RayTrainWorker" not in driver.said()
    assert driver.err.count("rank 0(2)") == 1
    kept = [found.step for found in inspect.scan(open_store(str(run.path / "checkpoints")))]
    assert sorted(kept) == [STEPS - 4, STEPS]
    assert not list(run.path.glob("checkpoint_*")), "no copy and no list of Ray's own"


def test_losses_on_a_mesh_of_two_dimensions(tmp_path: Path, joined: Cluster) -> None:
    under_ray = Driver(tmp_path / "ray", "--ray.num_workers", "4", *HSDP, cluster=joined).finish()
    assert under_ray.losses == torchrun(tmp_path / "torchrun", 4, *HSDP).losses
    assert joined.alive(), "a cluster that was joined is left running"


def test_a_killed_worker_costs_at_most_one_interval(
    tmp_path: Path, joined: Cluster, undisturbed: Run
) -> None:
    driver = Driver(tmp_path / "run", *SLOWLY, cluster=joined)
    at, rank = random.randrange(5, 12), random.randrange(2)
    reached = driver.until_resumable(at)
    os.kill(rank_pid(driver.run, rank), signal.SIGKILL)
    check_whole(driver.finish(), undisturbed)
    assert driver.run.starts[1]["from_step"] >= reached - EVERY, f"rank {rank} killed at step {reached}"
    assert driver.err.count("restarting the workers (1 of 3)") == 1


@pytest.mark.parametrize(
    ("number", "client"),
    [
        (signal.SIGINT, ""),
        (signal.SIGTERM, ""),
        pytest.param(signal.SIGINT, "ray://{}:10001", marks=pytest.mark.needs("grpcio")),
    ],
)
def test_a_signal_at_the_driver_seals_a_checkpoint_and_leaves_with_0(
    tmp_path: Path, joined: Cluster, undisturbed: Run, number: signal.Signals, client: str
) -> None:
    """ray.init and Ray's core replace a process's handler of SIGTERM. Also by Ray Client."""
    address = client.format(joined.address.partition(":")[0]) or joined.address
    driver = Driver(tmp_path / "run", *SLOWLY, "--ray.address", address, cluster=joined)
    driver.until(5)
    driver.signal(number)
    run = driver.finish()
    stopped = max(run.steps)
    assert 5 <= stopped < STEPS
    assert f"stopped by {number.name} at step {stopped}" in driver.out
    assert re.search(rf"^Ray \S+ at {address}: 2 workers", driver.err, re.MULTILINE), driver.err
    assert (run.path / "checkpoints" / f"step-{stopped:08}").is_dir()
    assert not (run.path / "STOP").exists()
    if number == signal.SIGTERM:
        check_whole(Driver(run.path, cluster=joined).finish(), undisturbed)


def test_a_job_that_ray_started_with_code_of_its_own_trains_with_variables_of_the_workers(
    tmp_path: Path, joined: Cluster
) -> None:
    """`ray job submit --runtime-env FILE -- python train.py --backend ray` sets both variables."""
    given = {"SHARDRUN_GIVEN": "two words", "OMP_NUM_THREADS": "2"}
    flags = [word for name, value in given.items() for word in ("--ray.env", f"{name}={value}")]
    flags += [f"--model.args.{name}={value!r}" for name, value in given.items()]
    flags += ["--model.name", "tests.ray.variables:build", "--data.name", "digits", "--train.steps", "1"]
    job = {"runtime_env": {"py_modules": ["gcs://_ray_pkg_0123456789abcdef.zip"]}}
    variables = {"RAY_ADDRESS": joined.address, "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)}
    driver = Driver(tmp_path / "run", *flags, cluster=joined, **variables)
    assert driver.finish().steps == [1]
    assert f"at {joined.address}: 2 workers" in driver.err
    assert "SHARDRUN_GIVEN" not in os.environ


def test_more_workers_than_the_cluster_has_is_said_at_once(tmp_path: Path, joined: Cluster) -> None:
    driver = Driver(tmp_path / "run", "--ray.num_workers", "9", cluster=joined)
    assert driver.wait() == 3
    assert "9 workers × 1 CPU do not fit on 2 nodes of 2 CPU, 2 CPU: room for 4." in driver.err
    assert "HINT: --ray.num_workers 4" in driver.err
    assert "Traceback" not in driver.err
    assert not driver.run.starts
