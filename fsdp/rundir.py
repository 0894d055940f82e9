"""The run directory: what a run is called, where its files lie, and the history of its starts.

    config.toml     the newest resolved configuration      metrics.jsonl   an object a step or evaluation
    history.jsonl   when, who, from which step, why ended   checkpoints/ full_model/ tensorboard/ logs/
    STOPPED         the last start left by request: why     DONE            the last step was reached
    FAILED          the last start's error: what it means

Only rank 0 writes here, apart from checkpoints. Who may write at all is fsdp/claim.py's.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp import config as configuration
from fsdp.config import Config
from fsdp.env import DistEnv
from fsdp.errors import ConfigError

RUNS = Path("runs")


@dataclass(frozen=True)
class RunDir:
    """Paths by name."""

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


def new_name(config: Config) -> str:
    """Sorts by time, says what it is, and two started in one second differ."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    model = config.model.name.replace(":", "-").replace(".", "-")
    return f"{now}-{model}-{Path(config.data.name.replace(':', '-')).name}-{secrets.token_hex(2)}"


def choose(config: Config) -> Path:
    return Path(config.run.dir).absolute() if config.run.dir else (RUNS / new_name(config)).absolute()


def create(path: Path) -> RunDir:
    """Rank 0 makes the folders, or says why the place cannot be written."""
    try:
        for folder in (path, path / "logs", path / "tensorboard"):
            folder.mkdir(parents=True, exist_ok=True)
        probe = path / f".writable-{secrets.token_hex(4)}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--run.dir {path} cannot be written ({error.strerror}).", "--run.dir runs/NAME") from None
    return RunDir(path)


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, whole."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def write_config(run: RunDir, config: Config) -> list[str]:
    """Keep the configuration, and return what has changed since the last start as `field: old → new`."""
    changed: list[str] = []
    if run.config.exists():
        old = configuration.read_recipe(str(run.config))
        for name, value in configuration.flatten(config).items():
            if name.partition(".")[0] in configuration.LAUNCHERS_OWN:
                continue
            before = old.get(name, {} if isinstance(value, Mapping) else value)
            if before != value:
                changed.append(f"{name}: {before} → {value}")
    write_atomically(run.config, configuration.run_toml(config))
    return changed


def append(path: Path, record: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines only: a line that a kill cut off is the last, and is no record."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def truncate_metrics(run: RunDir, step: int) -> None:
    """A run that goes on from `step` draws the later steps anew: one curve, no step twice."""
    if not run.metrics.exists():
        return
    kept = [json.dumps(record) for record in read_records(run.metrics) if record["step"] <= step]
    write_atomically(run.metrics, "".join(line + "\n" for line in kept))


def other_data(run: RunDir, data: Mapping[str, Any]) -> list[str]:
    """A line where the last start trained on other data than this one: step n would no longer mean the same samples."""
    starts = [event for event in read_records(run.history) if event["event"] == "start"]
    before = starts[-1].get("data", data) if starts else data
    return (
        []
        if before == data
        else [f"the data: {_said(before)} → {_said(data)}; a step's samples are not what they would have been"]
    )


def _said(data: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in data.items())


def record_start(
    run: RunDir, env: DistEnv, *, from_step: int, changed: list[str], nodes: list[str], data: Mapping[str, Any]
) -> None:
    for marker in (run.stopped, run.done, run.failed):
        marker.unlink(missing_ok=True)
    append(
        run.history,
        {
            "event": "start",
            "time": now(),
            "launcher": env.launcher,
            "nodes": nodes,
            "ranks": env.world_size,
            "from_step": from_step,
            "pid": os.getpid(),
            "changed": changed,
            "data": dict(data),
        },
    )


def record_end(run: RunDir, *, step: int, why: str) -> None:
    append(run.history, {"event": "end", "time": now(), "step": step, "why": why})


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def host() -> str:
    return socket.gethostname()
