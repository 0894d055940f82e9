"""What a report shows, gathered from a run directory's own files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp.checkpoint.inspect import Found, scan
from fsdp.checkpoint.store import open_store
from fsdp.config import FIELDS, read_recipe
from fsdp.errors import ConfigError
from fsdp.rundir import RunDir, read_records

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class RunStory:
    """A run as its files tell it."""

    name: str
    config: Mapping[str, Any]
    changed: Mapping[str, Any]
    series: Mapping[str, Points]
    history: list[dict[str, Any]]
    checkpoints: list[Found]

    @property
    def last_step(self) -> int:
        return int(max((points[-1][0] for points in self.series.values() if points), default=0))


def read_run(path: Path) -> RunStory:
    run = RunDir(path)
    if not run.config.exists():
        raise ConfigError(f"{path} is no run directory: it has no config.toml.", "ls -d runs/*")
    config = read_recipe(str(run.config))
    return RunStory(
        name=path.name,
        config=config,
        changed={name: value for name, value in config.items() if name in FIELDS and value != FIELDS[name].default},
        series=_series(run),
        history=list(read_records(run.history)),
        checkpoints=_checkpoints(str(config.get("checkpoint.dir") or path / "checkpoints")),
    )


def _series(run: RunDir) -> dict[str, Points]:
    series: dict[str, Points] = {}
    for record in read_records(run.metrics):
        step = float(record["step"])
        for name, value in record.items():
            if name != "step" and isinstance(value, (int, float)):
                series.setdefault(name, []).append((step, float(value)))
    return series


def _checkpoints(place: str) -> list[Found]:
    """The whole ones and those that are not, newest first."""
    return scan(open_store(place))
