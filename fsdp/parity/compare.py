"""Both sides started at once, and each mesh judged as soon as it is done.

Not here: what either side does (plain.py, ranks.py), or how a difference is measured (measure.py).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp.base.errors import ConfigError
from fsdp.parity.measure import NO_GRADIENT, ROUNDED_NO_GRADIENT, Measure, ParityDifference, without_gradient
from fsdp.parity.options import Comparison, ParityOptions, Row, rows
from fsdp.parity.ranks import run_of, sharded_ranks
from fsdp.parity.reference import Plain, TrainingRecord

if TYPE_CHECKING:
    import torch

    from fsdp.run.job import Job

Say = Callable[[str], None]


def compare(asked: ParityOptions, say: Say) -> Iterator[tuple[Row, list[ParityDifference]]]:
    """Each mesh's differences from the plain loop. The ranks train while the plain loop does; `say` receives
    the progress.
    """
    import torch

    on_cuda = torch.cuda.is_available() and torch.cuda.device_count() >= asked.ranks
    device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
    # More threads than free cores wait for one another in each product: minutes instead of seconds.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // (asked.ranks + 1)))
    tried = rows(asked.ranks)
    jobs = jobs_of(asked, tried, device)
    with (
        tempfile.TemporaryDirectory(prefix="parity-") as folder,
        sharded_ranks(asked, tried, folder, on_cuda) as done,
    ):
        reference = Reference(asked, jobs, device, say)
        for at in done:
            yield tried[at], reference.judge(at, folder)
            shutil.rmtree(Path(folder, str(at)))
            say(f"{at + 1} of {len(tried)} meshes done")


def jobs_of(asked: ParityOptions, tried: list[Row], device: torch.device) -> list[Job]:
    """What each mesh trains, refused here if it cannot be compared."""
    from fsdp.run.job import prepare

    jobs = [
        prepare(asked.config(row, ""), world_size=asked.ranks, num_nodes=1, device=device) for row in tried
    ]
    _refuse_chance(jobs[0])
    return jobs


class Reference:
    """The plain loop's trainings, and what they say of how exact a comparison can be."""

    def __init__(self, asked: ParityOptions, jobs: list[Job], device: torch.device, say: Say) -> None:
        self._plain, self._jobs, self._say = Plain(asked, jobs[0], device), jobs, say
        self._trained: dict[tuple[Comparison, int], TrainingRecord] = {}
        rounds, adaptive = self._plain.rounds, asked.config(None, "").optim.name != "sgd"
        bare = without_gradient(
            self._get(Comparison.GRADIENT, 0), ROUNDED_NO_GRADIENT if rounds else NO_GRADIENT
        )
        self.measure = Measure(asked.dtype, rounds, adaptive, bare)
        for note in self.notes():
            say(f"note: {note}")

    def judge(self, at: int, folder: str) -> list[ParityDifference]:
        """Of the mesh whose runs are in `folder`: every difference, of all its trainings."""
        found = []
        for training in Comparison:
            plain = self._get(training, at)
            found += self.measure.differences(training, _read(run_of(folder, at, training), plain), plain)
        return found

    def notes(self) -> Iterator[str]:
        measure = self.measure
        if measure.rounds:
            bounds = f"{measure.bound(Comparison.GRADIENT):.0e}, and {measure.bound(Comparison.ASKED):.0e} as asked"
            yield f"{measure.rounds} although float64 is asked for: the bounds are {bounds}, of the whole model"
        if measure.flat:
            first, more = min(measure.flat), len(measure.flat) - 1
            others = f" and {more} other parameters" if more else ""
            yield f"the gradient of {first}{others} is 0 but for rounding, which Adam enlarges: left out as asked"
        if not self._plain.loss.of_logits:
            yield "the model's own loss is no cross entropy of its logits: the plain loop takes it of a whole batch at once"

    def _get(self, training: Comparison, at: int) -> TrainingRecord:
        """Micro-batches matter to the plain loop where each has an auxiliary loss of its own."""
        accumulation = self._jobs[at].batch.accumulation if self._plain.loss.by_piece else 1
        key = (training, accumulation)
        if key not in self._trained:
            self._say(f"plain loop: {training}")
            self._trained[key] = self._plain.train(training, self._jobs[at].batch.accumulation)
        return self._trained[key]


def _read(run: Path, plain: TrainingRecord) -> TrainingRecord:
    """What a run wrote: its parameters, losses and gradient norms."""
    import torch

    whole = torch.load(run / "full_model" / "full-model.pt", weights_only=True)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "grad_norm" in record]
    return TrainingRecord(
        plain.start, whole, [step["loss"] for step in steps], [step["grad_norm"] for step in steps]
    )


def _refuse_chance(job: Job) -> None:
    """Where chance or the company of other rows decides, no two splits of a batch give the same numbers."""
    from torch import nn

    from fsdp.run.job import meta_model

    dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    for name, module in meta_model(job.spec).named_modules():
        if (isinstance(module, dropouts) and module.p) or (
            isinstance(module, nn.MultiheadAttention) and module.dropout
        ):
            raise ConfigError(
                f"{name} drops values at random: runs cannot be compared.", "--model.args.dropout 0.0"
            )
        if isinstance(module, norms):
            raise ConfigError(
                f"{name} normalises over the rows that a rank has: runs cannot be compared.",
                "a model without BatchNorm",
            )
