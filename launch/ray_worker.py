"""One Ray worker as one rank that trains or predicts: its DistEnv, its Reporter, and its errors, picklable.

Ray has created the process group and runs the function on another thread than the main one: the driver
handles signals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fsdp.base.errors import LaunchError, ShardrunError
from fsdp.base.object_client import is_url
from fsdp.base.text import PrintableFormatter
from fsdp.checkpoint.inspect import scan
from fsdp.checkpoint.store import open_store
from fsdp.config import Config
from fsdp.distributed import collectives
from fsdp.distributed.env import DistEnv, is_peer_failure
from fsdp.record.recorder import Reporter
from fsdp.run.evaluate import Outcome
from fsdp.run.loop import train
from launch.guard import Failure, failure_of
from launch.policy import Kind
from launch.ray_cluster import SNAPSHOT, RankFailed

BEAT_S = 1.0
"""The interval of reports to Ray. Its controller reads one report per poll: a report per step would wait."""


def work(task: Mapping[str, Any]) -> Outcome:
    """train_loop_per_worker of a run. `task` is a dictionary because Ray's controller reads it too, and would
    import torch for a class of this module: `config`, `logs`, and `folder`, the driver's working directory.
    """
    with _as_rank(task):
        return train_and_report(task["config"])


def predict(task: Mapping[str, Any]) -> str:
    """train_loop_per_worker of a prediction, of `argv`: what this rank prints; rank 0's is the answer."""
    from fsdp.predict.__main__ import answer_as_rank

    printed = io.StringIO()
    with _as_rank(task), contextlib.redirect_stdout(printed):
        answer_as_rank(task["argv"], dist_env())
    return printed.getvalue()


def train_and_report(config: Config, reporter: Reporter | None = None) -> Outcome:
    """Train as this worker's rank; metrics and checkpoints go to Ray, or to a reporter of the user."""
    env = dist_env()
    to_ray = RayReporter(env.rank) if reporter is None else None
    outcome = train(config, env, reporter or to_ray, process_ends=True)
    if to_ray is not None:
        to_ray.close(config, outcome.run_dir)
    return outcome


@contextlib.contextmanager
def _as_rank(task: Mapping[str, Any]) -> Iterator[None]:
    """The errors of the block reach the driver as one of this rank. Its output and log go to files, line by
    line, which the driver follows.
    """
    import ray.train

    rank: int = ray.train.get_context().get_world_rank()
    task["logs"].mkdir(parents=True, exist_ok=True)
    name = f"rank-{rank}.{time.time():.0f}-{os.getpid()}"
    sys.stdout, sys.stderr = (
        (task["logs"] / f"{name}.{ending}").open("a", buffering=1, encoding="utf-8")
        for ending in ("out", "err")
    )
    # Ray's errors reach the driver as an exception
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    logging.lastResort = logging.StreamHandler(sys.stderr)
    logging.lastResort.setFormatter(PrintableFormatter())
    logging.lastResort.setLevel(logging.WARNING)
    # Ray has imported torch before it sets the variable
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
    if task["folder"].is_dir():
        os.chdir(task["folder"])
    try:
        yield
    except Exception as error:
        raise rank_failure(rank, error) from None


SCHEMES = {"s3": "s3", "gcs": "gs", "abfs": "az"}
"""Of URLs, by the type names of pyarrow's file systems."""


def storage_place(storage: Any) -> str:
    """`storage_path/name` of the trainer's RunConfig, which Ray has checked on every node: a folder or a
    URL.
    """
    kind, path = storage.storage_filesystem.type_name, storage.experiment_fs_path
    return str(path) if kind == "local" else f"{SCHEMES.get(kind, kind)}://{path}"


def rank_failure(rank: int, error: Exception) -> RankFailed:
    """The error of a rank, as the driver receives it."""
    if is_peer_failure(error):
        gone = Failure(Kind.DIED, LaunchError.exit_code, "another rank is gone", echo=True)
        return RankFailed(rank, gone)
    trace = "" if isinstance(error, ShardrunError) else traceback.format_exc()
    return RankFailed(rank, dataclasses.replace(failure_of(error), trace=trace))


def dist_env() -> DistEnv:
    """The DistEnv of this worker. Collective: it counts the workers of each node."""
    import ray.train
    import ray.train.torch

    context = ray.train.get_context()
    shares = dict(collectives.all_gather_objects((context.get_node_rank(), context.get_local_world_size())))
    # nodes with unequal numbers of workers cannot be a mesh axis: they count as one node
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


NextReport = tuple[dict[str, Any] | None, str | None, bool]
"""What all ranks report next, broadcast by rank 0: metrics, a checkpoint, and whether it is the last.

Plain types: it passes through a process of Ray's, which would import this module, and torch, for a class.
"""

MOST_CHECKPOINTS = 5
"""Reported at the end: each takes a poll of Ray's controller, two seconds by default."""


class RayReporter(Reporter):
    """Reports the newest numbers to Ray on a thread, at most once per BEAT_S: the steps do not wait.

    ray.train.report is a collective that waits for Ray's controller. So rank 0 decides when and what to
    report and broadcasts it to the other ranks' threads: every rank makes the same reports.

    The newest sealed checkpoint is the metric `checkpoint`. Those that fsdp/checkpoint/inspect.py has kept
    are reported as checkpoints at the end, in place: Ray's Result lists what is there. Ray does not start
    again in a storage whose own list names one that is gone, so the list is removed: a start finds the
    newest checkpoint itself.
    """

    def __init__(self, rank: int) -> None:
        import ray.train

        self._rank = rank
        storage: Any = ray.train.get_context().get_storage()
        self._filesystem, self._path = storage.storage_filesystem, storage.experiment_fs_path
        self._place = storage_place(storage)
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._latest: dict[str, Any] = {}
        self._reported = True
        self._final: list[NextReport] = []
        self._reason: str | None = None
        self._error: BaseException | None = None
        self._forget_list()
        self._thread = threading.Thread(target=self._report_all, name="reporter", daemon=True)
        self._thread.start()

    def report(self, metrics: Mapping[str, float], checkpoint: str | None = None) -> None:
        if self._error is not None:
            raise self._error
        if self._rank:
            return  # rank 0 has the same numbers, and its thread broadcasts them
        with self._lock:
            self._latest |= {**metrics, **({"checkpoint": checkpoint} if checkpoint else {})}
            self._reported = False

    def should_stop(self) -> str | None:
        return self._reason

    def close(self, config: Config, run: Path) -> None:
        """Make the last reports; call it on every rank after the last step. Ray takes no checkpoints outside
        its storage.
        """
        store = config.checkpoint.dir or str(run / "checkpoints")
        store = store.rstrip("/") if is_url(store) else str(Path(store).absolute())
        final: list[NextReport] = []
        if self._rank == 0 and store.startswith(f"{self._place}/"):
            folder = self._path + store.removeprefix(self._place)
            sealed = [
                (dict(checkpoint.manifest.metrics), f"{folder}/{checkpoint.folder}", False)
                for checkpoint in scan(open_store(store))
                if checkpoint.manifest is not None
            ]
            final = [*reversed(sealed[:MOST_CHECKPOINTS])]  # the newest stands first, and comes last
        with self._lock:
            metrics, newest, _ = final.pop() if final else (None, None, True)
            self._final = [*final, ({**(metrics or {}), **self._latest} or None, newest, True)]
        self._news.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _report_all(self) -> None:
        import ray.train
        from ray.train import Checkpoint, CheckpointUploadMode
        from ray.train.collective import broadcast_from_rank_zero

        try:
            while True:
                metrics, checkpoint, over = broadcast_from_rank_zero(
                    self._next() if self._rank == 0 else None
                )
                if metrics is not None and checkpoint is None:
                    ray.train.report(metrics)
                elif metrics is not None:
                    in_place = Checkpoint(checkpoint, filesystem=self._filesystem)
                    mode = CheckpointUploadMode.NO_UPLOAD
                    ray.train.report(metrics, checkpoint=in_place, checkpoint_upload_mode=mode)
                if over:
                    ray.train.get_all_reported_checkpoints()  # waits until Ray has it
                    return self._forget_list()
                notice = ray.train.get_preemption_info()
                if notice is not None and self._reason is None:
                    self._reason = f"ranks {notice.preempted_ranks} are on nodes that will be taken away"
        except BaseException as error:
            self._error = error

    def _next(self) -> NextReport:
        """Rank 0: wait for BEAT_S or the end."""
        self._news.wait(BEAT_S)
        with self._lock:
            if self._final:
                return self._final.pop(0)
            news = None if self._reported else dict(self._latest)
            self._reported = True
            return news, None, False

    def _forget_list(self) -> None:
        """Rank 0: remove Ray's list, which Ray writes at each report of a checkpoint."""
        if self._rank == 0:
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.delete_file(f"{self._path}/{SNAPSHOT}")
