"""Config → TorchTrainer: the driver of a run under Ray, which `python train.py --backend ray` calls.

It checks the flags, chooses the run directory, starts or joins a Ray, trains, and prints the same summary or
error as a run under torchrun. The workers seal the checkpoints themselves; Ray receives their paths. Not
here: the worker (ray_worker.py), Ray itself (ray_own.py, ray_cluster.py), the workers' resources and code
(ray_resources.py, ray_code_upload.py), their output (ray_output.py).
"""

from __future__ import annotations

import dataclasses
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fsdp import config as configuration
from fsdp.base.errors import LaunchError, ShardrunError
from fsdp.base.phases import StopReason
from fsdp.config import Config, worker_range
from fsdp.config.trust import named_code
from fsdp.dist.env import allocator_variable, job_start
from fsdp.run.evaluate import Outcome
from fsdp.run.job import prepare
from fsdp.run.summary import summary
from fsdp.rundir import history, paths
from fsdp.rundir.paths import RunDir
from launch import ray_cluster, slurm_job
from launch.command import ray_command
from launch.guard import failure_of
from launch.marker import Failure, marker_of
from launch.policy import NODES_LEAVE, Act, Allocation, End, Kind, Past, decide
from launch.ray_check import check_ranks
from launch.ray_code_upload import runtime_env
from launch.ray_failure import FailurePolicy, failure_of_fit
from launch.ray_output import Follower
from launch.ray_own import OwnRay
from launch.ray_resources import Workers, workers_for
from launch.ray_stop import StoppedEarly, Stopping
from launch.ray_worker import WorkerTask, work

REPOSITORY = Path(__file__).resolve().parent.parent
SNAPSHOT = "checkpoint_manager_snapshot.json"
RESIZE_S = 10.0
"""How often an elastic run checks whether it can grow; growing costs the steps since the last checkpoint."""


class WorkersFailed(ShardrunError):
    """The failure of the worker group, with the exit code of the rank that failed first."""

    def __init__(self, message: str, exit_code: int, kind: Kind) -> None:
        super().__init__(message)
        self.exit_code, self.kind = exit_code, kind


def run_on_ray(config: Config, own: OwnRay | None, stopping: Stopping) -> int:
    """Train, and return the exit code of train.py. `own` is the local Ray that starts meanwhile, if any."""
    _check(config)
    run = paths.create(paths.choose(config).path)
    config = configuration.replace(config, run__dir=str(run.path))
    try:
        with slurm_job.holding(run, job_start()):
            pass  # a refusal here leaves nothing behind; the workers take the lock themselves
        stopping.run = run
        return _run(config, own, run, stopping)
    except ShardrunError as error:
        if not isinstance(error, StoppedEarly) and (marker := marker_of(config)) is not None:
            kind = error.kind if isinstance(error, WorkersFailed) else failure_of(error).kind
            marker.write(Failure(kind, error.exit_code, str(error)), rank=0)
        raise


def _run(config: Config, own: OwnRay | None, run: RunDir, stopping: Stopping) -> int:
    logs = run.path / "logs" / f"ray-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    follower = Follower(logs)
    try:
        with workers_code(config) as code, ray_cluster.connected(own, config.ray, code) as name:
            stopping.handle()
            workers = workers_for(config.ray, config.run.device)
            print(f"{name}: {workers}", file=sys.stderr, flush=True)
            outcome = _train_to_the_end(WorkerTask(config, run.path, logs, Path.cwd()), workers, stopping)
    finally:
        follower.close()
    if stopping.signal is not None and outcome.stopped:
        outcome = dataclasses.replace(outcome, stopped=stopping.signal.name)
        stopping.mark(run, stopping.signal.name, outcome.step)
    print(summary(outcome, config, ray_command(config)))
    return 0


def _check(config: Config) -> None:
    """Raise the errors in the flags that can be found without a cluster."""
    low, _ = worker_range(config.ray.num_workers)
    check_ranks(config)
    device = torch.device("cpu") if config.run.device == "cpu" else None
    prepare(config, world_size=low, num_nodes=1, device=device)


@contextmanager
def workers_code(config: Config) -> Iterator[Mapping[str, Any]]:
    """The runtime_env: empty for a local Ray, which shares sys.path; the code for a joined one."""
    if not config.ray.address:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="shardrun-code-") as folder:
        yield runtime_env(REPOSITORY, named_code(config), Path(folder))


# ---------------------------------------------------------------- training


def _train_to_the_end(task: WorkerTask, workers: Workers, stopping: Stopping) -> Outcome:
    """Train; after a stop for a preemption notice, continue on the nodes that stay."""
    idle, step = 0, -1
    while True:
        outcome = _fit(task, workers, stopping)
        if (
            outcome.stopped is None
            or StopReason.read(outcome.stopped) is not NODES_LEAVE
            or stopping.signal is not None
        ):
            return outcome
        idle, step = (0 if outcome.step > step else idle + 1), outcome.step
        end = End(Kind.NODES_LEAVE, outcome.step, why=outcome.stopped)
        if decide(end, Past(idle_stops=idle), Allocation()).act is Act.END:
            return outcome
        print(
            f"saved step {outcome.step} before nodes are preempted; continuing on the others",
            file=sys.stderr,
            flush=True,
        )


def _fit(task: WorkerTask, workers: Workers, stopping: Stopping) -> Outcome:
    from ray.train import TrainingFailedError

    try:
        result = _with_controller(task, workers, stopping)
    except TrainingFailedError as error:
        failure = failure_of_fit(error)
        if failure.trace:
            print(failure.trace, file=sys.stderr)
        raise WorkersFailed(failure.message, failure.exit_code, failure.kind) from None
    outcome = result.return_value
    if not isinstance(outcome, Outcome):
        raise LaunchError(f"Ray ended the run without a result of rank 0 (its files are in {task.run}).")
    return outcome


def _with_controller(task: WorkerTask, workers: Workers, stopping: Stopping) -> Any:
    """Ray's result. Its TrainController is one actor that Ray does not restart: one that died before a rank
    started lost nothing and is started again, once. Seen on a busy head node with one CPU.
    """
    from ray.exceptions import RayActorError

    run = RunDir(task.run)
    starts = history.count_starts(run)
    for attempt in (1, 2):
        # It lists checkpoints that retention may have removed since: Ray would refuse to start.
        (task.run / SNAPSHOT).unlink(missing_ok=True)
        try:
            return stopping.train(_trainer(task, workers).fit, task.run / "STOP")
        except RayActorError as error:
            words = " ".join(str(error).split())
            started = history.count_starts(run) > starts
            if attempt == 2 or started or stopping.signal is not None:
                raise _controller_died(task, words) from None
            print(f"Ray's TrainController died before it ran: {words} Starting it again.", file=sys.stderr)
    raise AssertionError("unreachable")


def _controller_died(task: WorkerTask, words: str) -> WorkersFailed:
    hint = (
        "the same command continues from the last checkpoint; python -m fsdp.checkpoint "
        f"{task.run} lists them, and `ray logs cluster` has the controller's log"
    )
    return WorkersFailed(f"Ray's TrainController died: {words} HINT: {hint}", 3, Kind.ERROR)


def _trainer(task: WorkerTask, workers: Workers) -> Any:
    import ray.train.torch

    api: Any = ray.train  # its exports depend on an environment variable, which a type checker ignores
    cuda = workers.gpus > 0
    scaling = api.ScalingConfig(
        num_workers=workers.low if workers.low == workers.high else (workers.low, workers.high),
        use_gpu=cuda,
        resources_per_worker=workers.resources,
        elastic_resize_monitor_interval_s=RESIZE_S,
    )
    running = api.RunConfig(
        name=task.run.name,
        storage_path=str(task.run.parent),
        failure_config=api.FailureConfig(max_failures=task.config.ray.max_failures),
        callbacks=[FailurePolicy(task.run, task.logs, task.config.ray.max_failures)],
        # Ray starts CUDA before the run does. --ray.env is the user's own word and comes last.
        worker_runtime_env={
            "env_vars": {
                "OMP_NUM_THREADS": workers.threads,
                **allocator_variable(task.config.run.allocator, cuda=cuda),
                **task.config.ray.env,
            }
        },
    )
    return api.torch.TorchTrainer(
        work,
        # a dict: Ray's controller reads it too, and would import torch for a class of ray_worker
        train_loop_config=dict(vars(task)),
        torch_config=api.torch.TorchConfig(
            backend=workers.backend, timeout_s=int(task.config.run.process_group_timeout_s)
        ),
        scaling_config=scaling,
        run_config=running,
    )
