"""--run.mlflow EXPERIMENT: the numbers of rank 0 to MLflow, if mlflow or mlflow-skinny is installed.

MLflow's own variables select the server and the user: MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN.
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

TAG = "shardrun.run_dir"
"""The tag by which a later start finds its MLflow run."""
LONGEST, BATCH, METRICS = 500, 100, 1000
"""Characters of a parameter's value, and parameters and metrics of one call, that every server accepts."""


def check_mlflow(experiment: str) -> None:
    """ConfigError if MLflow is not installed; on every rank, before the first collective."""
    if experiment and importlib.util.find_spec("mlflow") is None:
        raise ConfigError(
            f"--run.mlflow {experiment}: mlflow is not installed.",
            "pip install mlflow-skinny, or leave --run.mlflow out",
        )


class MlflowSink:
    """One MLflow run for a run directory: a later start continues it, and logs no step of a metric twice."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        """Raises ConfigError if the server refuses, or is not there."""
        self._mlflow: Any = importlib.import_module("mlflow")
        self._last: dict[str, int] = {}
        try:
            self._open(config, run_dir)
        except Exception as error:
            raise ConfigError(
                f"--run.mlflow {config.run.mlflow}: {one_line(error)}",
                "export MLFLOW_TRACKING_URI=http://HOST:PORT, or leave --run.mlflow out",
            ) from error
        self._sender = Sender(type(self).__name__, self._log, lambda: self._client.set_terminated(self._run))

    def _open(self, config: Config, run_dir: Path) -> None:
        self._client = self._mlflow.MlflowClient()
        name = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]
        experiment = self._experiment(config.run.mlflow)
        found = self._client.search_runs([experiment], f"tags.`{TAG}` = '{name}'", max_results=1)
        self._continued = bool(found)
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            tags = {TAG: name}
            self._run = self._client.create_run(experiment, run_name=run_dir.name, tags=tags).info.run_id
            self._parameters(flatten(config))

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def _parameters(self, values: Mapping[str, object]) -> None:
        made = [self._mlflow.entities.Param(key, str(value)[:LONGEST]) for key, value in values.items()]
        for first in range(0, len(made), BATCH):
            self._client.log_batch(self._run, params=made[first : first + BATCH])

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._sender.put(step, values)

    def _log(self, entries: Sequence[TimedRecord]) -> None:
        """On the sender's thread: a server that is away holds a call for minutes."""
        metrics = []
        for step, values, at in entries:
            fresh = {key: value for key, value in values.items() if step > self._last_step(key)}
            self._last.update(dict.fromkeys(fresh, step))
            metrics += [
                self._mlflow.entities.Metric(key, value, int(1000 * at), step) for key, value in fresh.items()
            ]
        for first in range(0, len(metrics), METRICS):
            self._client.log_batch(self._run, metrics=metrics[first : first + METRICS])

    def _last_step(self, key: str) -> int:
        """Of an earlier start too. Its repeated steps are left out: MLflow would keep both."""
        if key not in self._last:
            earlier = self._client.get_metric_history(self._run, key) if self._continued else []
            self._last[key] = max((one.step for one in earlier), default=-1)
        return self._last[key]

    def close(self) -> None:
        self._sender.close()
