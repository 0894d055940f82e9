"""Starts both sides at once and judges each mesh as soon as it is done.

Not here: either side (reference.py, ranks.py), or the size of a difference (measure.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp.base.errors import ConfigError
from fsdp.parity.measure import NO_GRADIENT, ROUNDED_NO_GRADIENT, Measure, ParityDifference, without_gradient
from fsdp.parity.options import Comparison, ParityOptions, Row, rows
from fsdp.parity.ranks import run_of, sharded_rows
from fsdp.parity.reference import PlainLoop, TrainingRecord

if TYPE_CHECKING:
    import torch

    from fsdp.run.job import Job

Log = Callable[[str], None]


def compare(options: ParityOptions, log: Log) -> Iterator[tuple[Row, list[ParityDifference] | str]]:
    """Each mesh's differences from the plain loop, or why it is not possible. `log` receives progress."""
    import torch

    on_cuda = runs_on_cuda(options)
    device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
    # More threads than free cores wait for one another in each matrix product: minutes instead of seconds.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // (options.ranks + 1)))
    jobs, refused = jobs_of(options, device)
    yield from refused.items()
    reference = None
    with (
        tempfile.TemporaryDirectory(prefix="parity-") as folder,
        contextlib.closing(sharded_rows(options, list(jobs), folder, on_cuda)) as trained,
    ):
        for row, reason in trained:
            if reason:
                yield row, reason
                continue
            reference = reference or Reference(options, jobs, device, log)  # beside the ranks' next mesh
            yield row, reference.judge(row, folder)
            shutil.rmtree(Path(folder, row.name))


def runs_on_cuda(options: ParityOptions) -> bool:
    """auto takes GPUs if there is one for each rank."""
    import torch

    wanted = options.config(None, "").run.device
    gpus = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted == "cuda" and gpus < options.ranks:
        raise ConfigError(
            f"--run.device cuda: {gpus} GPUs are visible, and --parity.ranks {options.ranks} needs one each.",
            f"--parity.ranks {gpus}" if gpus else "--run.device cpu",
        )
    return gpus >= options.ranks


def jobs_of(options: ParityOptions, device: torch.device) -> tuple[dict[Row, Job], dict[Row, str]]:
    """The job of each mesh that the flags allow, and why the others are not possible; ConfigError if all are
    not, or if the model cannot be compared.
    """
    from fsdp.run.job import prepare

    jobs: dict[Row, Job] = {}
    refused: dict[Row, ConfigError] = {}
    for row in rows(options.ranks):
        try:
            config = options.config(row, "")
            jobs[row] = prepare(config, world_size=options.ranks, num_nodes=1, device=device)
        except ConfigError as error:
            refused[row] = error
    if not jobs:
        raise next(iter(refused.values()))
    _refuse_random(next(iter(jobs.values())))
    return jobs, {row: str(error) for row, error in refused.items()}


class Reference:
    """The plain loop's trainings, and the precision of a comparison that follows from them."""

    def __init__(self, options: ParityOptions, jobs: dict[Row, Job], device: torch.device, log: Log) -> None:
        self._plain, self._log = PlainLoop(options, next(iter(jobs.values())), device), log
        self._accumulation = {row: job.batch.accumulation for row, job in jobs.items()}
        self._trained: dict[tuple[Comparison, int], TrainingRecord] = {}
        rounds, adaptive = self._plain.rounds, options.config(None, "").optim.name != "sgd"
        rounding_only = without_gradient(
            self._get(Comparison.GRADIENT, next(iter(jobs))), ROUNDED_NO_GRADIENT if rounds else NO_GRADIENT
        )
        self.measure = Measure(options.dtype, rounds, adaptive, rounding_only)
        for note in self.notes():
            log(f"note: {note}")

    def judge(self, row: Row, folder: str) -> list[ParityDifference]:
        """The differences of all trainings of one mesh, whose runs are in `folder`."""
        found = []
        for training in Comparison:
            plain = self._get(training, row)
            found += self.measure.differences(training, _read(run_of(folder, row, training), plain), plain)
        return found

    def notes(self) -> Iterator[str]:
        measure = self.measure
        if measure.rounds:
            bounds = [f"{measure.bound(kind):.0e}" for kind in (Comparison.GRADIENT, Comparison.CONFIGURED)]
            yield (
                f"{measure.rounds} although the run computes in float64: "
                f"the bound of the whole model is {bounds[0]}, and {bounds[1]} in 'configured'"
            )
        if measure.flat:
            first, more = min(measure.flat), len(measure.flat) - 1
            others = f" and {more} other parameter{'s' * (more > 1)}" if more else ""
            yield (
                f"the gradient of {first}{others} is 0 except for rounding, which Adam amplifies: "
                "not compared in 'configured'"
            )
        if self._plain.loss.own:
            yield (
                "the model's own loss is trained: the plain loop computes it for each rank's micro-batch, as "
                "the run does, and another number of ranks may train otherwise"
            )

    def _get(self, training: Comparison, row: Row) -> TrainingRecord:
        key = (training, self._accumulation[row])
        if key not in self._trained:
            self._log(f"plain loop: {training}")
            self._trained[key] = self._plain.train(*key)
        return self._trained[key]


def _read(run: Path, plain: TrainingRecord) -> TrainingRecord:
    """A run's parameters, losses and gradient norms from its files."""
    import torch

    whole = torch.load(run / "full_model" / "full-model.pt", weights_only=True)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "grad_norm" in record]
    return TrainingRecord(
        plain.start, whole, [step["loss"] for step in steps], [step["grad_norm"] for step in steps]
    )


def _refuse_random(job: Job) -> None:
    """ConfigError for dropout and BatchNorm: their results depend on how a batch is split."""
    from torch import nn

    from fsdp.models.checks import batch_norms
    from fsdp.run.job import meta_model

    dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    model = meta_model(job.spec)
    for name, module in model.named_modules():
        if (isinstance(module, dropouts) and module.p) or (
            isinstance(module, nn.MultiheadAttention) and module.dropout
        ):
            raise ConfigError(
                f"{name} drops values at random: runs cannot be compared.", _without_dropout(job)
            )
    for name in batch_norms(model):
        raise ConfigError(
            f"{name} normalises over the rows that a rank has: runs cannot be compared.",
            "a model without BatchNorm",
        )


def _without_dropout(job: Job) -> str:
    """The flags that turn dropout off; a model of transformers has a field of its configuration for each."""
    config: Any = getattr(job.spec.pretrained, "config", None)
    given = config.to_dict() if hasattr(config, "to_dict") else {"dropout": 1.0}
    names = (name for name, value in given.items() if "drop" in name and isinstance(value, float) and value)
    return " ".join(f"--model.args.{name} 0.0" for name in names)
