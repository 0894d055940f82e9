"""Trackers and sinks of the user: Weights & Biases, MLflow, a class of one's own.

A tracker is a class here, named in TRACKERS. Servers get their records from a thread of their own: one
that is slow or away does not slow the steps. While a call lasts, up to MOST_WAITING records wait, and the
next call sends them together. Later ones are lost; the log says so when that begins and when it ends.

A sink of the user is `--run.sinks package.module:Class`, several separated by commas:

    Class(*, run_dir, config, from_step) → an object with scalars(step, values), and optionally close()

Made on rank 0 before the first step, with those of the arguments that it accepts. An exception in one loses
its records and is logged; the run continues.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError, one_line
from fsdp.config import Config, flatten
from fsdp.record import STUCK
from fsdp.record.recorder import Losses, Sink

log = logging.getLogger(__name__)

TimedRecord = tuple[int, Mapping[str, Any], float]
"""Step, numbers or rows of texts by name, and when they were recorded."""
FLAG = "--run.sinks"
MOST_WAITING = 10_000
TOGETHER = 64
CLOSE_S = 20.0
"""How long the end of a run waits for the server."""
RUN_DIR_TAG = "shardrun.run_dir"
"""The tag by which a later start finds its MLflow run."""
LONGEST, BATCH, METRICS = 500, 100, 1000
"""Characters of a parameter's value, parameters and metrics of a call: all MLflow servers accept these."""


# ---------------------------------------------------------------- trackers


class TrackerSink:
    """A server's run for a run directory: a later start of the same directory continues it. Records reach the
    server on a thread of its own.
    """

    flag = package = hint = ""
    """The field of the run section and the module's name; what pip installs; what helps if it fails."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        """Raises ConfigError if the server refuses, or is not there."""
        self._key = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]
        try:
            self.open(config, run_dir)
        except Exception as error:
            value = getattr(config.run, self.flag)
            hint = f"{self.hint}, or leave --run.{self.flag} out"
            raise ConfigError(f"--run.{self.flag} {value}: {one_line(error)}", hint) from error
        self._losses = Losses(type(self).__name__)
        self._waiting: queue.SimpleQueue[TimedRecord | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=type(self).__name__, daemon=True)
        self._thread.start()

    def open(self, config: Config, run_dir: Path) -> None:
        raise NotImplementedError

    def send(self, entries: Sequence[TimedRecord]) -> None:
        """Those that have come since its last call; on the thread."""
        raise NotImplementedError

    def finish(self) -> None:
        """After the last record; on the thread."""
        raise NotImplementedError

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put((step, values, time.time()))
        else:
            self._losses.add(step, f"{MOST_WAITING:,} records wait for it")

    texts = scalars

    def close(self) -> None:
        """Waits CLOSE_S at most. In a process that lives on the thread still sends what is left."""
        self._waiting.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            STUCK.set()
            message = "%s has not taken its last records %g s after the last step: they may be lost"
            log.warning(message, type(self).__name__, CLOSE_S)

    def _serve(self) -> None:
        entries = list[TimedRecord | None]()
        while None not in entries:
            entries = [self._waiting.get()]
            while len(entries) < TOGETHER and not self._waiting.empty():
                entries.append(self._waiting.get())
            records = [entry for entry in entries if entry is not None]
            try:
                if records:
                    self.send(records)
                    self._losses.end(records[-1][0])
            except Exception as error:  # the server is away, or refuses a value
                self._losses.add(records[-1][0], error, len(records))
        try:
            self.finish()
        except Exception as error:
            self._losses.not_closed(error)


class WandbSink(TrackerSink):
    """Weights & Biases. Its own variables select mode, server and entity: WANDB_MODE, WANDB_BASE_URL,
    WANDB_ENTITY.
    """

    flag, package, hint = "wandb", "wandb", "wandb login, or export WANDB_MODE=offline"

    def open(self, config: Config, run_dir: Path) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=config.run.wandb,
            name=run_dir.name,
            id=self._key,
            resume="allow",
            dir=str(run_dir),
            config=flatten(config),
        )
        # An own step metric: a start that resumes from an earlier checkpoint repeats steps, which W&B's own
        # counter rejects.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def send(self, entries: Sequence[TimedRecord]) -> None:
        for step, values, _ in entries:
            self._run.log({"step": step} | {name: self._logged(value) for name, value in values.items()})

    def _logged(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        wandb: Any = importlib.import_module("wandb")
        return wandb.Table(columns=[*value[0]], data=[[*row.values()] for row in value])

    def finish(self) -> None:
        self._run.finish()  # waits for the server without a limit


class MlflowSink(TrackerSink):
    """MLflow logs no step of a metric twice. Its own variables select the server and the user:
    MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN.
    """

    flag, package, hint = "mlflow", "mlflow-skinny", "export MLFLOW_TRACKING_URI=http://HOST:PORT"

    def open(self, config: Config, run_dir: Path) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        self._client = self._mlflow.MlflowClient()
        self._last: dict[str, int] = {}
        name = config.run.mlflow
        known = self._client.get_experiment_by_name(name)
        experiment = str(known.experiment_id if known else self._client.create_experiment(name))
        earlier = self._client.search_runs(
            [experiment], f"tags.`{RUN_DIR_TAG}` = '{self._key}'", max_results=1
        )
        self._continued = bool(earlier)
        if earlier:
            self._run = earlier[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        tags = {RUN_DIR_TAG: self._key}
        self._run = self._client.create_run(experiment, run_name=run_dir.name, tags=tags).info.run_id
        fields = flatten(config).items()
        parameters = [self._mlflow.entities.Param(name, str(value)[:LONGEST]) for name, value in fields]
        for first in range(0, len(parameters), BATCH):
            self._client.log_batch(self._run, params=parameters[first : first + BATCH])

    def send(self, entries: Sequence[TimedRecord]) -> None:
        metrics = []
        for step, values, moment in entries:
            rows = {name: value for name, value in values.items() if isinstance(value, list)}
            for name, value in rows.items():
                text = json.dumps(value, indent=1, ensure_ascii=False)
                self._client.log_text(self._run, text, f"{name}/step-{step:08}.json")
            for name in [name for name in values if name not in rows and step > self._last_step(name)]:
                self._last[name] = step
                metrics.append(self._mlflow.entities.Metric(name, values[name], int(1000 * moment), step))
        for first in range(0, len(metrics), METRICS):
            self._client.log_batch(self._run, metrics=metrics[first : first + METRICS])

    def _last_step(self, name: str) -> int:
        """Of an earlier start too. Its repeated steps are left out: MLflow would keep both."""
        if name not in self._last:
            earlier = self._client.get_metric_history(self._run, name) if self._continued else []
            self._last[name] = max((metric.step for metric in earlier), default=-1)
        return self._last[name]

    def finish(self) -> None:
        self._client.set_terminated(self._run)


TRACKERS = (WandbSink, MlflowSink)


def check_sinks(config: Config) -> None:
    """ConfigError if a package or a class is missing; on every rank, before the first collective."""
    for tracker in TRACKERS:
        flag = tracker.flag
        value = getattr(config.run, flag)
        if value and importlib.util.find_spec(flag) is None:
            reason = f"--run.{flag} {value}: {flag} is not installed."
            raise ConfigError(reason, f"pip install {tracker.package}, or leave --run.{flag} out")
    _classes(config)


def build_sinks(config: Config, run_dir: Path, from_step: int) -> Iterator[tuple[Sink, str]]:
    """One after the other, with its label, on rank 0. Raises ConfigError."""
    for tracker in TRACKERS:
        if getattr(config.run, tracker.flag):
            yield tracker(config, run_dir), ""
    arguments = {"run_dir": run_dir, "config": flatten(config), "from_step": from_step}
    for path, factory in _classes(config).items():
        yield _custom(f"{FLAG} {path}", factory, arguments), f"{FLAG} {path}"


# ---------------------------------------------------------------- sinks of the user


def _custom(label: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> Sink:
    from fsdp.models.registry import blame, parameters_of

    accepted = parameters_of(factory)
    names = arguments if accepted is None or accepted.any_name else accepted.named
    try:
        sink: Sink = factory(**{name: value for name, value in arguments.items() if name in names})
    except Exception as error:
        hint = "it is called with (*, run_dir, config, from_step)"
        raise ConfigError(f"{label} failed: {blame(error)}.", hint) from error
    if not callable(getattr(sink, "scalars", None)):
        reason = f"{label}: {type(sink).__name__} has no method scalars."
        raise ConfigError(reason, "def scalars(self, step, values): ...")
    return sink


def _classes(config: Config) -> dict[str, Callable[..., Any]]:
    """The classes of --run.sinks by name, imported."""
    from fsdp.models import load_attribute

    paths = [part.strip() for part in config.run.sinks.split(",")]
    return {path: load_attribute(path, FLAG) for path in paths if path}
