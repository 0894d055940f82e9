"""train(config) in this process: a script, a notebook, a rank of torchrun or srun, a worker of Ray Train.

The process is not ended, and errors are raised: ShardrunError, or the exception of the user's own code. Not
here: messages and exit codes (guard.py), the parts for a loop of one's own (fsdp/run/own_loop.py).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from fsdp import config as configuration
from fsdp.base.errors import ConfigError
from fsdp.base.object_client import is_url
from fsdp.base.proc import cache_folder
from fsdp.base.torch_private import forget_meshes
from fsdp.config import Config
from fsdp.distributed.env import DistEnv, from_environment
from fsdp.distributed.process_group import free_ended_groups
from fsdp.record.recorder import Reporter
from fsdp.run import own_loop
from fsdp.run.evaluate import Outcome
from fsdp.run.loop import train as train_rank
from fsdp.shard.shard import Sharded

if TYPE_CHECKING:
    from launch.ray_worker import RayReporter


def load_config(flags: Sequence[str] = (), **values: Any) -> Config:
    """The configuration of these flags, with `section__field=value` over them. Raises ConfigError."""
    return configuration.load(flags, {name.replace("__", "."): value for name, value in values.items()})


def train(config: Config | Sequence[str], *, reporter: Reporter | None = None) -> Outcome:
    """Trains as this process's rank, from the newest checkpoint of `run.dir` if there is one.

    `config` may be the flags of train.py. Under torchrun, srun or Ray Train every rank calls this; elsewhere
    it is one process. In a worker of Ray Train the metrics and checkpoints go to `ray.train.report`, and an
    empty `run.dir` is the folder of the trainer's RunConfig, `storage_path/name`; a URL gets the checkpoints.
    """
    resolved = config if isinstance(config, Config) else load_config(config)
    if resolved.backend == "ray":
        raise ConfigError(
            "backend ray starts ranks of its own, which a call in this process cannot.",
            "leave it out in a worker of Ray Train, or python train.py --backend ray",
        )
    try:
        if _is_ray_worker():
            from launch.ray_worker import train_and_report

            return train_and_report(_with_storage(resolved), reporter)
        return train_rank(resolved, from_environment(device=resolved.run.device), reporter)
    finally:
        # FSDP2's modules are reference cycles: until a collection of the oldest generation, which is rare,
        # they keep the run's device memory, and its process groups their threads. So do DTensor's caches.
        forget_meshes()
        gc.collect()
        free_ended_groups()


def record_of(outcome: Outcome) -> dict[str, Any]:
    """The outcome as plain types: it can be unpickled where this package is not installed."""
    evaluation = outcome.evaluation
    return {
        "run_dir": str(outcome.run_dir),
        "step": outcome.step,
        "stopped": outcome.stopped,
        "eval_loss": evaluation.loss if evaluation is not None else None,
        "accuracy": evaluation.accuracy if evaluation is not None else None,
    }


def _is_ray_worker() -> bool:
    """Whether this process is a worker of a TorchTrainer. Ray is imported by its worker before this."""
    if "ray.train" not in sys.modules:
        return False
    import ray.train

    try:
        ray.train.get_context().get_storage()
    except (RuntimeError, DeprecationWarning, NotImplementedError):
        return False  # a driver or an actor, a trial of Tune, Ray's local mode
    return True


class ReportedTraining(own_loop.Training):
    __doc__ = own_loop.Training.__doc__

    def __init__(
        self, config: Config, env: DistEnv, model: Sharded, optimizer: torch.optim.Optimizer
    ) -> None:
        self._ray: RayReporter | None = None
        if _is_ray_worker():
            from launch.ray_worker import RayReporter

            self._ray, config = RayReporter(env.rank), _with_storage(config)
        super().__init__(config, env, model, optimizer, self._ray)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._ray is not None and error is None:
            self._ray.close(self.config, self.run.path)


Training = ReportedTraining


def _with_storage(config: Config) -> Config:
    """An empty run.dir is Ray's storage. A URL gets the checkpoints, and each node has a folder for the
    rest.
    """
    import ray.train

    from launch.ray_worker import storage_place

    if config.run.dir:
        return config
    storage = storage_place(ray.train.get_context().get_storage())
    if not is_url(storage):
        return configuration.replace(config, run__dir=storage)
    run = cache_folder("runs", storage.replace("://", "-").replace("/", "-"))
    store = config.checkpoint.dir or f"{storage}/checkpoints"
    return configuration.replace(config, run__dir=str(run), checkpoint__dir=store)
