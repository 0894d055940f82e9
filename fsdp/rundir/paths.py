"""The run directory: its name and the paths of its files.

    config.toml     the newest resolved configuration
    metrics.jsonl   one record per step and per evaluation
    history.jsonl   one record per start, end and crash
    STOPPED         the reason of a stop on request, if the last start ended so
    DONE            written when the last step is reached
    FAILED          the last start's error, for its launcher
    checkpoints/ full_model/ tensorboard/ logs/

Rank 0 alone writes here, except checkpoints. Not here: the lock (lock.py), the records of starts and ends
(history.py), the format of `*.jsonl` (line_files.py).
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp.base.errors import ConfigError
from fsdp.rundir.atomic_write import write_atomically, writing

if TYPE_CHECKING:
    from fsdp.config import Config

RUNS = Path("runs")
PROBE_BYTES = 4096
"""Written and synced before a start: an empty file can be made on a disk that has no block left."""


@dataclass(frozen=True)
class RunDir:
    """The paths in a run directory."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def history(self) -> Path:
        return self.path / "history.jsonl"

    @property
    def stopped(self) -> Path:
        return self.path / "STOPPED"

    @property
    def done(self) -> Path:
        return self.path / "DONE"

    @property
    def failed(self) -> Path:
        return self.path / "FAILED"

    @property
    def full_model(self) -> Path:
        return self.path / "full_model"

    @property
    def full_model_ema(self) -> Path:
        return self.path / "full_model_ema"


def new_name(config: Config) -> str:
    """Time, model and data set; a random suffix distinguishes two runs started in one second."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    model = config.model.name.replace(":", "-").replace(".", "-").replace("/", "-").strip("-")
    data = "-".join(one.label for one in config.data.sources) or config.data.name
    data = Path(data.replace(":", "-")).name[:40]
    return f"{now}-{model}-{data}-{os.urandom(2).hex()}"


def choose(config: Config) -> Path:
    """--run.dir, or a new folder under runs/."""
    return Path(config.run.dir).absolute() if config.run.dir else (RUNS / new_name(config)).absolute()


def create(path: Path) -> RunDir:
    """Create the folders on rank 0, or raise an error that names the place that cannot be written."""
    with writing(path):
        for folder in (path, path / "logs", path / "tensorboard"):
            folder.mkdir(parents=True, exist_ok=True)
        # os.urandom, not secrets: that imports OpenSSL, 4 MiB in the monitor process of each node
        probe = path / f".writable-{os.urandom(4).hex()}"
        write_atomically(probe, " " * PROBE_BYTES)
        probe.unlink()
    return RunDir(path)


def write_config(run: RunDir, config: Config) -> list[str]:
    """Write config.toml, and return what has changed since the last start as `field: old → new`."""
    # here: the monitor process of each node imports this file and needs no configuration
    from fsdp import config as configuration

    changed: list[str] = []
    if run.config.is_file():
        try:
            old = configuration.read_recipe(str(run.config))
        except ConfigError as error:  # used for the comparison alone: the start continues
            why = str(error).partition(" HINT:")[0]
            changed.append(f"config.toml of the last start cannot be compared: {why}")
            old = {}
        for name, value in configuration.flatten(config).items():
            if name.partition(".")[0] in configuration.LAUNCHERS_OWN:
                continue
            if isinstance(value, tuple):
                value = configuration.as_tables(value)
            before = old.get(
                name, [] if isinstance(value, list) else {} if isinstance(value, Mapping) else value
            )
            if before != value:
                changed.append(f"{name}: {before} → {value}")
    write_atomically(run.config, configuration.run_toml(config))
    return changed
