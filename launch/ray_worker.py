"""One Ray worker as one rank: its DistEnv, its Reporter, and its errors in a form that crosses to the driver.

Ray has made the process group, and runs the function beside the main thread: signals are the driver's to
handle.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp.base.errors import LaunchError, ShardrunError
from fsdp.config import Config
from fsdp.dist import collectives
from fsdp.dist.env import DistEnv
from fsdp.dist.lost_peer import is_peer_failure
from fsdp.run.loop import Outcome, train
from launch.guard import failure_of
from launch.policy import Kind
from launch.ray_failure import RankFailed
from launch.ray_output import speak_into

BEAT_S = 1.0
"""Ray hears of a run this often. Its controller takes one report at each look: a report for each step would
wait for that.
"""


@dataclass(frozen=True)
class WorkerTask:
    """What the driver hands to every worker."""

    config: Config
    run: Path
    logs: Path
    folder: Path
    """Where the command was typed: relative paths in flags mean this."""


def work(given: Mapping[str, Any]) -> Outcome:
    """train_loop_per_worker."""
    import ray.train

    order = WorkerTask(**given)
    rank = ray.train.get_context().get_world_rank()
    speak_into(order.logs, rank, f"{time.time():.0f}-{os.getpid()}")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # Ray has imported torch before this was set
    if order.folder.is_dir():
        os.chdir(order.folder)
    try:
        env = dist_env()
        reporter = RayReporter(env.rank, order.run)
        outcome = train(order.config, env, reporter)
        reporter.close()
    except Exception as error:
        raise _last_words(rank, error) from None
    return outcome


def _last_words(rank: int, error: Exception) -> RankFailed:
    if is_peer_failure(error):
        return RankFailed(rank, "another rank is gone", LaunchError.exit_code, Kind.DIED, True, "")
    failure = failure_of(error)
    trace = "" if isinstance(error, ShardrunError) else traceback.format_exc()
    return RankFailed(rank, failure.message, failure.code, failure.kind, failure.echo, trace)


def dist_env() -> DistEnv:
    """The launcher gives the device and the ranks; the nodes are counted once."""
    import ray.train
    import ray.train.torch

    context = ray.train.get_context()
    shares = dict(collectives.everyones((context.get_node_rank(), context.get_local_world_size())))
    # nodes with unequal shares of the workers are no axis of a mesh: they count as one
    even = len(set(shares.values())) == 1
    return DistEnv(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        local_rank=context.get_local_rank(),
        local_world_size=context.get_local_world_size(),
        node_rank=context.get_node_rank() if even else 0,
        num_nodes=len(shares) if even else 1,
        device=ray.train.torch.get_device(),
        launcher="ray",
    )


# ---------------------------------------------------------------- the reporter


Word = tuple[dict[str, Any] | None, str | None, bool]
"""What rank 0 tells the others to report next: metrics, a checkpoint, and whether that was the last. Plain
types: the word goes through a process of Ray's own, which would import this module, and torch, to read a
class of ours.
"""


class RayReporter:
    """Tells Ray on a thread of its own, at most once a beat, with the newest numbers: the steps wait for
    nothing.

    ray.train.report is a collective that waits for Ray's controller. So rank 0 alone decides when and what;
    its word goes to the others' threads, and every rank reports the same, as often. A sealed checkpoint is
    always told, and only told: it stays where it is, under our own retention.
    """

    def __init__(self, rank: int, run: Path) -> None:
        self._rank, self._run = rank, run
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._latest: dict[str, Any] = {}
        self._told = True
        self._sealed: list[tuple[str, dict[str, Any]]] = []
        self._over = False
        self._reason: str | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._tell_all, name="reporter", daemon=True)
        self._thread.start()

    def report(self, metrics: Mapping[str, float], checkpoint: str | None = None) -> None:
        if self._error is not None:
            raise self._error
        if self._rank:
            return  # rank 0 says the same, and its thread hands it to this rank's
        with self._lock:
            if checkpoint is not None:
                self._sealed.append((checkpoint, {**self._latest, **metrics}))
                self._news.set()
            else:
                self._latest |= metrics
                self._told = False

    def should_stop(self) -> str | None:
        return self._reason

    def close(self) -> None:
        """After the last step on every rank: what is still to be told is told."""
        with self._lock:
            self._over = True
        self._news.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _tell_all(self) -> None:
        import ray.train
        from ray.train.collective import broadcast_from_rank_zero

        try:
            while True:
                metrics, checkpoint, over = broadcast_from_rank_zero(
                    self._next() if self._rank == 0 else None
                )
                if metrics is not None:
                    self._tell(metrics, checkpoint)
                if over:
                    return
                notice = ray.train.get_preemption_info()
                if notice is not None and self._reason is None:
                    self._reason = f"ranks {notice.preempted_ranks} are on nodes that will be taken away"
        except BaseException as error:
            self._error = error

    def _next(self) -> Word:
        """Rank 0: wait for a beat, a sealed checkpoint or the end."""
        self._news.wait(BEAT_S)
        with self._lock:
            if self._sealed:
                checkpoint, metrics = self._sealed.pop(0)
                return metrics, checkpoint, False
            metrics_or_none = None if self._told else dict(self._latest)
            self._told = True
            if not self._over:
                self._news.clear()
            return metrics_or_none, None, self._over

    def _tell(self, metrics: dict[str, Any], checkpoint: str | None) -> None:
        import ray.train
        from ray.train import Checkpoint, CheckpointUploadMode

        if checkpoint is None or not Path(checkpoint).is_relative_to(self._run):
            # one in an object store, or elsewhere: Ray takes no checkpoint from outside its own folder, but a
            # name of it
            extra = {"checkpoint": checkpoint} if checkpoint else {}
            ray.train.report({**metrics, **extra})
            return
        ray.train.report(
            metrics, checkpoint=Checkpoint(checkpoint), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD
        )
