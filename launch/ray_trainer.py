"""Config → TorchTrainer: the driver of a run under Ray, which `python train.py --backend ray` calls. And the
failure of a worker group, and whether it is restarted.

The driver checks the flags, chooses the run directory, starts or joins a Ray, trains, and prints the same
summary or error as a run under torchrun. The workers seal the checkpoints themselves; Ray receives their
paths. Ray restarts the group after any error, `--ray.max_failures` times; FailurePolicy runs in Ray's
controller, which imports no torch, and ends the run earlier if launch/policy.py decides so. Not here: the
worker (ray_worker.py), Ray itself, signals and output (ray_cluster.py).
"""

from __future__ import annotations

import dataclasses
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp import config as configuration
from fsdp.base.errors import LaunchError, ShardrunError, first_line
from fsdp.base.phases import StopReason
from fsdp.base.text import named_ranks
from fsdp.config import Config, worker_range
from fsdp.distributed.env import allocator_variable, job_start
from fsdp.rundir import history
from fsdp.rundir.history import RunDir
from launch import slurm_job
from launch.command import ray_command
from launch.guard import Failure, failure_of, marker_of
from launch.policy import EXIT_HUNG, NODES_LEAVE, Act, Allocation, End, Kind, Past, decide
from launch.ray_cluster import (
    SNAPSHOT,
    Follower,
    OwnRay,
    RankFailed,
    StoppedEarly,
    Stopping,
    Workers,
    connected,
    set_defaults,
    workers_for,
)

set_defaults()

from ray.train import UserCallback  # noqa: E402  (after the variables that Ray reads when it is imported)

if TYPE_CHECKING:
    from fsdp.run.evaluate import Outcome

RESIZE_S = 10.0
"""How often an elastic run checks whether it can grow; growing costs the steps since the last checkpoint."""


def run_on_ray(config: Config, local: OwnRay | None, stopping: Stopping) -> int:
    """Train, and return the exit code of train.py. `local` is the Ray that starts meanwhile, if any."""
    import torch

    from fsdp.run.job import prepare

    device = torch.device("cpu") if config.run.device == "cpu" else None
    prepare(config, world_size=worker_range(config.ray.num_workers)[0], num_nodes=1, device=device)
    run = history.create(history.choose(config).path)
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
    from fsdp.run.summary import summary

    logs = run.path / "logs" / f"ray-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    follower = Follower(logs)
    try:
        with connected(local, config) as name:
            stopping.handle()
            workers = workers_for(config.ray, config.run.device)
            print(f"{name}: {workers}", file=sys.stderr, flush=True)
            outcome = _train_to_the_end(config, run, logs, workers, stopping)
    finally:
        follower.close()
    if stopping.signal is not None and outcome.stopped:
        outcome = dataclasses.replace(outcome, stopped=stopping.signal.name)
        stopping.mark(run, stopping.signal.name, outcome.step)
    print(summary(outcome, config, ray_command(config)))
    return 0


def _train_to_the_end(
    config: Config, run: RunDir, logs: Path, workers: Workers, stopping: Stopping
) -> Outcome:
    """Train; after a stop for a preemption notice, continue on the nodes that stay."""
    from launch.ray_worker import work

    task = {"config": config, "logs": logs, "folder": Path.cwd()}
    # Ray starts CUDA before the run does. --ray.env is the user's own word and comes last.
    environment = {**allocator_variable(config.run.allocator, cuda=workers.gpus > 0), **config.ray.env}
    idle, step, limit = 0, -1, config.ray.max_failures
    while True:
        # It lists checkpoints that retention may have removed since: Ray would refuse to start.
        (run.path / SNAPSHOT).unlink(missing_ok=True)
        policy, timeout_s = FailurePolicy(run.path, logs, limit), config.run.process_group_timeout_s
        outcome = stopping.train(
            lambda: fit(work, task, workers, run.path, timeout_s, environment, policy),  # noqa: B023
            run.path / "STOP",
        )
        if outcome is None:
            raise LaunchError(f"Ray ended the run without a result of rank 0 (its files are in {run.path}).")
        leaves = outcome.stopped is not None and StopReason.read(outcome.stopped) is NODES_LEAVE
        if not leaves or stopping.signal is not None:
            return outcome  # type: ignore[no-any-return]
        idle, step = (0 if outcome.step > step else idle + 1), outcome.step
        end = End(Kind.NODES_LEAVE, outcome.step, why=outcome.stopped or "")
        if decide(end, Past(idle_stops=idle), Allocation()).act is Act.END:
            return outcome  # type: ignore[no-any-return]
        line = f"saved step {outcome.step} before nodes are preempted; continuing on the others"
        print(line, file=sys.stderr, flush=True)


def fit(
    function: Callable[[Mapping[str, Any]], Any],
    task: Mapping[str, Any],
    workers: Workers,
    folder: Path,
    timeout_s: float,
    environment: Mapping[str, str],
    policy: FailurePolicy | None = None,
) -> Any:
    """What rank 0's function returned; WorkersFailed with the first failure."""
    import ray.train.torch
    from ray.exceptions import RayActorError

    api: Any = ray.train  # its exports depend on an environment variable, which a type checker ignores
    gpus = workers.gpus
    trainer = api.torch.TorchTrainer(
        function,
        train_loop_config=dict(task),
        torch_config=api.torch.TorchConfig(
            "cpu:gloo,cuda:nccl" if gpus else "cpu:gloo", timeout_s=int(timeout_s)
        ),
        scaling_config=api.ScalingConfig(
            num_workers=workers.low if workers.low == workers.high else (workers.low, workers.high),
            use_gpu=gpus > 0,
            resources_per_worker={"CPU": workers.cpus, **({"GPU": gpus} if gpus else {})},
            elastic_resize_monitor_interval_s=RESIZE_S,
        ),
        run_config=api.RunConfig(
            name=folder.name,
            storage_path=str(folder.parent),
            failure_config=api.FailureConfig(max_failures=policy.limit if policy else 0),
            callbacks=[policy] if policy else None,
            worker_runtime_env={"env_vars": {"OMP_NUM_THREADS": str(workers.threads), **environment}},
        ),
    )
    try:
        return trainer.fit().return_value
    except api.TrainingFailedError as error:
        failure = failure_of_fit(error)
        if failure.trace:
            print(failure.trace, file=sys.stderr)
        raise WorkersFailed(failure) from None
    except RayActorError as error:  # of the TrainController, one actor that Ray does not restart
        died = f"Ray's TrainController died: {' '.join(str(error).split())}"
        hint = "the same command continues; `ray logs cluster` has the controller's log"
        raise WorkersFailed(Failure(Kind.ERROR, LaunchError.exit_code, f"{died} HINT: {hint}")) from None


# ---------------------------------------------------------------- failures


class RunEnded(Exception):
    """Raised in Ray's controller, where it ends the run: the group's failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


class WorkersFailed(ShardrunError):
    """The failure of the worker group, with the exit code of the rank that failed first."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.exit_code, self.kind = failure.code, failure.kind


def first_failure(failures: Mapping[int, BaseException]) -> Failure:
    """The failure that explains the others: a rank's own error, else a death, else a consequence."""
    errors = {rank: getattr(error, "_base_exc", error) for rank, error in sorted(failures.items())}
    failed = [error for error in errors.values() if isinstance(error, RankFailed)]
    dead = [rank for rank, error in errors.items() if not isinstance(error, RankFailed)]
    own = [error for error in failed if not error.failure.echo]
    if dead and not own:
        died = f"{named_ranks(dead)} died ({_of_death(errors[dead[0]])})"
        return Failure(Kind.DIED, LaunchError.exit_code, died)
    if not failed:
        return Failure(Kind.DIED, LaunchError.exit_code, "the workers failed")
    first = (own or failed)[0]
    return dataclasses.replace(first.failure, message=str(first))


def _of_death(error: BaseException) -> str:
    """The first line of Ray's long text about a death."""
    return first_line(getattr(error, "health_check_failure", error), 160)


def failure_of_fit(error: Any) -> Failure:
    """The failure behind an exception of trainer.fit."""
    cause = getattr(error, "controller_failure", None)
    if isinstance(cause, RunEnded):
        return cause.failure
    if cause is not None:
        return Failure(Kind.ERROR, LaunchError.exit_code, f"Ray's controller failed: {_of_death(cause)}")
    return first_failure(getattr(error, "worker_failures", {}))


class FailurePolicy(UserCallback):
    """Logs a failure of the group once, and ends the run if the policy decides so."""

    def __init__(self, run: Path, logs: Path, limit: int) -> None:
        self._run, self._logs, self.limit = RunDir(run), logs, limit
        self._crashes: list[End] = []
        self._starts = history.count_starts(self._run)

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        failure = first_failure(worker_exceptions)
        if failure.kind is Kind.DIED and slurm_job.hang_ended_newest_start(self._run):
            # Ray does not pass the exit code of a worker on
            failure = dataclasses.replace(failure, code=EXIT_HUNG)
        before, self._starts = self._starts, history.count_starts(self._run)
        step, starting = history.last_step(self._run.metrics), self._starts == before
        end = End(failure.kind, step, starting, failure.code, failure.message)
        decision = decide(end, Past(crashes=self._crashes), Allocation())  # Ray itself counts max_failures
        if decision.act is Act.END:
            # FINAL: a job script around the driver does not restart what the policy has ended
            kind = end.kind if end.kind is Kind.REFUSED else Kind.FINAL
            raise RunEnded(dataclasses.replace(failure, kind=kind, code=decision.code))
        self._crashes.append(end)
        count = len(self._crashes)
        if self.limit < 0 or count <= self.limit:
            line = f"{failure.message}, {end.where}; restarting the workers ({count} of {self.limit})"
            with (self._logs / "controller.err").open("a", encoding="utf-8") as file:
                file.write(line + "\n")
