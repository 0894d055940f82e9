"""Config → TorchTrainer: the driver of a run under Ray, which `python train.py --backend ray` calls.

It checks the flags, chooses the run directory, starts or joins a Ray, trains, and prints the same summary or
error as a run under torchrun. The workers seal the checkpoints themselves; Ray receives their paths. Not
here: the worker (ray_worker.py), Ray itself (ray_cluster.py), signals and output (ray_driver.py).
"""

from __future__ import annotations

import dataclasses
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fsdp import config as configuration
from fsdp.base.errors import LaunchError, ShardrunError
from fsdp.base.phases import StopReason
from fsdp.config import Config, worker_range
from fsdp.dist.env import allocator_variable, job_start
from fsdp.run.evaluate import Outcome
from fsdp.run.job import prepare
from fsdp.run.summary import summary
from fsdp.rundir import paths
from fsdp.rundir.paths import RunDir
from launch import slurm_job
from launch.command import ray_command
from launch.guard import failure_of
from launch.marker import Failure, marker_of
from launch.policy import NODES_LEAVE, Act, Allocation, End, Kind, Past, decide
from launch.ray_cluster import OwnRay, Workers, connected, workers_for
from launch.ray_driver import Follower, StoppedEarly, Stopping
from launch.ray_failure import FailurePolicy, WorkersFailed, failure_of_fit
from launch.ray_worker import SNAPSHOT, work


def run_on_ray(config: Config, local: OwnRay | None, stopping: Stopping) -> int:
    """Train, and return the exit code of train.py. `local` is the Ray that starts meanwhile, if any."""
    device = torch.device("cpu") if config.run.device == "cpu" else None
    prepare(config, world_size=worker_range(config.ray.num_workers)[0], num_nodes=1, device=device)
    run = paths.create(paths.choose(config).path)
    config = configuration.replace(config, run__dir=str(run.path))
    try:
        with slurm_job.holding(run, job_start()):
            pass  # a refusal here leaves nothing behind; the workers take the lock themselves
        stopping.run = run
        return _run(config, local, run, stopping)
    except ShardrunError as error:
        if not isinstance(error, StoppedEarly) and (marker := marker_of(config)) is not None:
            kind = error.kind if isinstance(error, WorkersFailed) else failure_of(error).kind
            marker.write(Failure(kind, error.exit_code, str(error)), rank=0)
        raise


def _run(config: Config, local: OwnRay | None, run: RunDir, stopping: Stopping) -> int:
    logs = run.path / "logs" / f"ray-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    follower = Follower(logs)
    try:
        with connected(local, config) as name:
            stopping.handle()
            workers = workers_for(config.ray, config.run.device)
            print(f"{name}: {workers}", file=sys.stderr, flush=True)
            outcome = _train_to_the_end(config, run.path, logs, workers, stopping)
    finally:
        follower.close()
    if stopping.signal is not None and outcome.stopped:
        outcome = dataclasses.replace(outcome, stopped=stopping.signal.name)
        stopping.mark(run, stopping.signal.name, outcome.step)
    print(summary(outcome, config, ray_command(config)))
    return 0


def _train_to_the_end(config: Config, run: Path, logs: Path, workers: Workers, stopping: Stopping) -> Outcome:
    """Train; after a stop for a preemption notice, continue on the nodes that stay."""
    idle, step = 0, -1
    while True:
        # It lists checkpoints that retention may have removed since: Ray would refuse to start.
        (run / SNAPSHOT).unlink(missing_ok=True)
        outcome = stopping.train(lambda: _fit(config, run, logs, workers), run / "STOP")
        if not isinstance(outcome, Outcome):
            raise LaunchError(f"Ray ended the run without a result of rank 0 (its files are in {run}).")
        leaves = outcome.stopped is not None and StopReason.read(outcome.stopped) is NODES_LEAVE
        if not leaves or stopping.signal is not None:
            return outcome
        idle, step = (0 if outcome.step > step else idle + 1), outcome.step
        end = End(Kind.NODES_LEAVE, outcome.step, why=outcome.stopped or "")
        if decide(end, Past(idle_stops=idle), Allocation()).act is Act.END:
            return outcome
        line = f"saved step {outcome.step} before nodes are preempted; continuing on the others"
        print(line, file=sys.stderr, flush=True)


def _fit(config: Config, run: Path, logs: Path, workers: Workers) -> Any:
    limit = config.ray.max_failures
    return fit(
        work,
        {"config": config, "logs": logs, "folder": Path.cwd()},
        workers,
        folder=run,
        # Ray starts CUDA before the run does. --ray.env is the user's own word and comes last.
        environment={**allocator_variable(config.run.allocator, cuda=workers.gpus > 0), **config.ray.env},
        timeout_s=int(config.run.process_group_timeout_s),
        max_failures=limit,
        callbacks=[FailurePolicy(run, logs, limit)],
    )


def fit(
    function: Callable[[Mapping[str, Any]], Any],
    task: Mapping[str, Any],
    workers: Workers,
    *,
    folder: Path,
    environment: Mapping[str, str],
    timeout_s: int,
    max_failures: int = 0,
    callbacks: list[Any] | None = None,
) -> Any:
    """What rank 0's function returned; WorkersFailed with the first failure."""
    import ray.train.torch
    from ray.exceptions import RayActorError

    api: Any = ray.train  # its exports depend on an environment variable, which a type checker ignores
    trainer = api.torch.TorchTrainer(
        function,
        train_loop_config=dict(task),
        run_config=api.RunConfig(
            name=folder.name,
            storage_path=str(folder.parent),
            failure_config=api.FailureConfig(max_failures=max_failures),
            callbacks=callbacks,
            worker_runtime_env={"env_vars": {"OMP_NUM_THREADS": str(workers.threads), **environment}},
        ),
        **workers.configs(timeout_s),
    )
    try:
        return trainer.fit().return_value
    except api.TrainingFailedError as error:
        failure = failure_of_fit(error)
        if failure.trace:
            print(failure.trace, file=sys.stderr)
        raise failure from None
    except RayActorError as error:  # of the TrainController, one actor that Ray does not restart
        died = f"Ray's TrainController died: {' '.join(str(error).split())}"
        hint = "the same command continues; `ray logs cluster` has the controller's log"
        raise WorkersFailed(Failure(Kind.ERROR, LaunchError.exit_code, f"{died} HINT: {hint}")) from None
