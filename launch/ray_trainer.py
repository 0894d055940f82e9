"""Config → TorchTrainer: the driver of a run under Ray. `python train.py --backend ray` ends up here.

It checks what can be checked, chooses the run directory, brings up or joins a Ray, lets it train, and says
how that ended, as torchrun's run says it. Checkpoints are ours, sealed by the workers themselves; Ray is told
where they are. What runs in a worker is in launch/ray_worker.py, Ray itself in ray_own.py and ray_cluster.py,
room and code for the workers in ray_room.py and ray_code.py, the ranks' words in ray_output.py.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fsdp import config as configuration
from fsdp.base.errors import LaunchError, ShardrunError
from fsdp.base.phases import StopReason
from fsdp.config import Config, worker_range
from fsdp.dist.env import slurm_start
from fsdp.dist.mesh import plan_batch, resolve
from fsdp.run.job import prepare
from fsdp.run.loop import Outcome
from fsdp.run.summary import summary
from fsdp.rundir import paths
from fsdp.rundir.atomic_write import write_atomically
from fsdp.rundir.paths import RunDir
from launch import ray_cluster, slurm_job
from launch.command import ray_command
from launch.guard import failure_of
from launch.marker import Failure, marker_of
from launch.policy import NODES_LEAVE, Act, Allocation, End, Kind, Past, decide
from launch.ray_code_upload import runtime_env
from launch.ray_failure import Referee, story_of
from launch.ray_output import Follower
from launch.ray_own import OwnRay
from launch.ray_resources import Workers, workers_for
from launch.ray_worker import WorkerTask, work

REPOSITORY = Path(__file__).resolve().parent.parent
SNAPSHOT = "checkpoint_manager_snapshot.json"
RESIZE_S = 10.0
"""How often an elastic run looks whether it may grow; growing costs it the steps since the last checkpoint.
"""


class WorkersFailed(ShardrunError):
    """What a rank died of, with that rank's own exit code."""

    def __init__(self, message: str, exit_code: int, kind: Kind) -> None:
        super().__init__(message)
        self.exit_code, self.kind = exit_code, kind


def run_on_ray(config: Config, own: OwnRay | None) -> int:
    """The exit code of train.py. `own` is the Ray that is coming up meanwhile, where none is to be joined."""
    _check(config)
    run = paths.create(paths.choose(config))
    config = configuration.replace(config, run__dir=str(run.path))
    try:
        with slurm_job.holding(run, slurm_start()):
            pass  # refused here, nothing is written; the workers take the lock themselves
        return _run(config, own, run)
    except ShardrunError as error:
        if (marker := marker_of(config)) is not None:
            kind = error.kind if isinstance(error, WorkersFailed) else failure_of(error).kind
            marker.write(Failure(kind, error.exit_code, str(error)), rank=0)
        raise


def _run(config: Config, own: OwnRay | None, run: RunDir) -> int:
    logs = run.path / "logs" / f"ray-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    with Stopping(Path(config.stop.file) if config.stop.file else run.path / "STOP") as stopping:
        follower = Follower(logs)
        try:
            with _code(config) as code, ray_cluster.connected(own, config.ray, code) as name:
                workers = workers_for(config.ray, config.run.device)
                print(f"{name}: {workers}", file=sys.stderr, flush=True)
                outcome = _train_to_the_end(WorkerTask(config, run.path, logs, Path.cwd()), workers, stopping)
        finally:
            follower.close()
    if stopping.signal is not None and outcome.stopped:
        outcome = dataclasses.replace(outcome, stopped=stopping.signal.name)
        write_atomically(run.stopped, f"{outcome.stopped} at step {outcome.step}\n")
    print(summary(outcome, config, ray_command(config)))
    return 0


def _check(config: Config) -> None:
    """Every mistake that needs no cluster to be seen."""
    low, high = worker_range(config.ray.num_workers)
    prepare(config, world_size=low, num_nodes=1, device=torch.device("cpu"))
    for ranks in range(low + 1, high + 1):  # an elastic run may meet any of them
        resolve(config.mesh, ranks)
        plan_batch(config.train, ranks)


@contextmanager
def _code(config: Config) -> Iterator[Mapping[str, Any]]:
    """A Ray started here shares our sys.path; one that is joined is given the code."""
    if not config.ray.address:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="shardrun-code-") as folder:
        own = [name for name in (config.model.name, config.data.name) if ":" in name]
        yield runtime_env(REPOSITORY, own, Path(folder))


# ---------------------------------------------------------------- training


def _train_to_the_end(order: WorkerTask, workers: Workers, stopping: Stopping) -> Outcome:
    """After a preemption notice, whose checkpoint is sealed, again: on the nodes that stay."""
    idle, step = 0, -1
    while True:
        outcome = _fit(order, workers, stopping)
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
            f"saved step {outcome.step} before nodes are taken away; going on with the others",
            file=sys.stderr,
            flush=True,
        )


def _fit(order: WorkerTask, workers: Workers, stopping: Stopping) -> Outcome:
    from ray.train import TrainingFailedError

    # It names checkpoints that our retention may have removed since, and Ray would refuse to start over them.
    (order.run / SNAPSHOT).unlink(missing_ok=True)
    trainer = _trainer(order, workers)
    try:
        result = stopping.wait_for(trainer.fit)
    except TrainingFailedError as error:
        story = story_of(error)
        if story.trace:
            print(story.trace, file=sys.stderr)
        raise WorkersFailed(story.message, story.exit_code, story.kind) from None
    outcome = result.return_value
    if not isinstance(outcome, Outcome):
        raise LaunchError(f"Ray ended the run without a word of rank 0 (its files are in {order.run}).")
    return outcome


def _trainer(order: WorkerTask, workers: Workers) -> Any:
    import ray.train.torch

    api: Any = ray.train  # what it exports depends on a variable, which a type checker does not read
    cuda = workers.gpus > 0
    backend = "cpu:gloo,cuda:nccl" if cuda else "cpu:gloo"
    scaling = api.ScalingConfig(
        num_workers=workers.low if workers.low == workers.high else (workers.low, workers.high),
        use_gpu=cuda,
        resources_per_worker={"CPU": workers.cpus, **({"GPU": workers.gpus} if cuda else {})},
        elastic_resize_monitor_interval_s=RESIZE_S,
    )
    running = api.RunConfig(
        name=order.run.name,
        storage_path=str(order.run.parent),
        failure_config=api.FailureConfig(max_failures=order.config.ray.max_failures),
        callbacks=[Referee(order.run, order.logs, order.config.ray.max_failures)],
        worker_runtime_env={"env_vars": {"OMP_NUM_THREADS": _threads(workers)}},
    )
    return api.torch.TorchTrainer(
        work,
        # by name: Ray's controller reads this too, and would import all of training to read a class of
        # ray_worker's
        train_loop_config=dict(vars(order)),
        torch_config=api.torch.TorchConfig(
            backend=backend, timeout_s=int(order.config.run.process_group_timeout_s)
        ),
        scaling_config=scaling,
        run_config=running,
    )


def _threads(workers: Workers) -> str:
    """As torchrun sets it: 1, unless the person says otherwise or gives a worker several CPUs."""
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, int(workers.cpus)))


# ---------------------------------------------------------------- being asked to stop


@dataclass
class _Fit:
    """What a call in a thread came to."""

    value: Any = None
    error: BaseException | None = None


class Stopping:
    """Ctrl-C and a scheduler's signals at the driver become the stop file of the ranks; Ctrl-C again leaves
    at once.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    AGAIN_S = 1.0
    LOOK_S = 0.2

    def __init__(self, file: Path) -> None:
        self._file = file
        self.signal: signal.Signals | None = None
        self._asked_at = 0.0
        self._leave = False

    def __enter__(self) -> Stopping:
        self._old = {one: signal.signal(one, self._mark) for one in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for one, handler in self._old.items():
            signal.signal(one, handler)
        if self.signal is not None:
            self._file.unlink(missing_ok=True)

    def _mark(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._asked_at = signal.Signals(number), now
        elif number == signal.SIGINT and now - self._asked_at >= self.AGAIN_S:
            self._leave = True

    def wait_for(self, function: Callable[[], Any]) -> Any:
        """Call it in a thread (Ray would take the main thread's Ctrl-C for itself); meanwhile pass on what is
        asked.
        """
        done = _Fit()
        thread = threading.Thread(target=self._call, args=(function, done), name="fit", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(self.LOOK_S)
            if self._leave:
                raise WorkersFailed("interrupted again: left at once, nothing saved.", 130, Kind.FINAL)
            # A start removes what the stop before it left there, so it is put down anew until the ranks are
            # out.
            if self.signal is not None and thread.is_alive() and not self._file.exists():
                self._file.touch()
        if done.error is not None:
            raise done.error
        return done.value

    @staticmethod
    def _call(function: Callable[[], Any], done: _Fit) -> None:
        try:
            done.value = function()
        except BaseException as error:
            done.error = error
