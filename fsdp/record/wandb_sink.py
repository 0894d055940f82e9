"""--run.wandb PROJECT: the same numbers to Weights & Biases, where it is installed and was asked for.

How it reports (online, offline, disabled) is its own variables' to say: WANDB_MODE, WANDB_BASE_URL,
WANDB_ENTITY.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.config import Config, flatten


def check_wandb(project: str) -> None:
    """On every rank, before the first collective: they all miss it or none does."""
    if project and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"--run.wandb {project}: wandb is not installed.", "pip install wandb, or leave --run.wandb out"
        )


class WandbSink:
    """One run there for a run directory here: a later start of the same directory goes on in it."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        wandb: Any = importlib.import_module("wandb")
        name = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]
        self._run = wandb.init(
            project=config.run.wandb,
            name=run_dir.name,
            id=name,
            resume="allow",
            dir=str(run_dir),
            config=flatten(config),
        )
        # A step of its own: a start that goes on from an earlier checkpoint makes steps again, which W&B's
        # counter refuses.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()
