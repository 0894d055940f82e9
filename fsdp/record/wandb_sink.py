"""--run.wandb PROJECT: the numbers of rank 0 to Weights & Biases, if it is installed.

Its own variables select the mode, server and entity: WANDB_MODE, WANDB_BASE_URL, WANDB_ENTITY.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError, one_line
from fsdp.config import Config, flatten
from fsdp.record.sender import Sender, TimedRecord


def check_wandb(project: str) -> None:
    """ConfigError if wandb is not installed; on every rank, before the first collective."""
    if project and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"--run.wandb {project}: wandb is not installed.", "pip install wandb, or leave --run.wandb out"
        )


class WandbSink:
    """One Weights & Biases run for a run directory: a later start of the same directory continues it."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        """Raises ConfigError without a login, or if the server refuses."""
        try:
            self._run = self._open(config, run_dir)
        except Exception as error:
            raise ConfigError(
                f"--run.wandb {config.run.wandb}: {one_line(error)}",
                "wandb login, or export WANDB_MODE=offline, or leave --run.wandb out",
            ) from error
        # An own step metric: a start that resumes from an earlier checkpoint repeats steps, which W&B's own
        # counter rejects.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        # finish() waits for the server without a limit
        self._sender = Sender(type(self).__name__, self._log, self._run.finish)

    def _open(self, config: Config, run_dir: Path) -> Any:
        wandb: Any = importlib.import_module("wandb")
        name = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]
        return wandb.init(
            project=config.run.wandb,
            name=run_dir.name,
            id=name,
            resume="allow",
            dir=str(run_dir),
            config=flatten(config),
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._sender.put(step, values)

    def _log(self, entries: Sequence[TimedRecord]) -> None:
        for step, values, _ in entries:
            self._run.log({"step": step, **values})

    def close(self) -> None:
        self._sender.close()
