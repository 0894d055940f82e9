"""Starts both sides at once and judges each mesh as soon as it is done.

A gradient's difference is relative to its norm, or to a thousandth of the model's norm if that is larger: the
bias of attention's keys has mathematically no gradient, only rounding. The difference of a trained parameter
is relative to its change in the same way. Not here: either side (reference.py, ranks.py).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp.base.errors import ConfigError
from fsdp.parity.options import BOUNDS, CLIP, FAR, Comparison, ParityOptions, Row, rows
from fsdp.parity.ranks import run_of, sharded_rows
from fsdp.parity.reference import PlainLoop, TrainingRecord

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fsdp.run.job import Job

Log = Callable[[str], None]
SMALL = 1e-3
"""Of the model's norm: the smallest scale of a parameter's difference."""
ROUNDING = 1e-5
"""Of a parameter's norm: a smaller change cannot be distinguished from rounding."""
ADAPTIVE = 1e4
"""Factor on the bound for Adam, which may divide by rounding alone (eps is 1e-8)."""
ROUNDED_INSIDE, ROUNDED_CONFIGURED = 1e-5, 1e-2
"""Bounds of a model that computes in float32 inside: of gradients and SGD, and of the run's own optimizer."""
NO_GRADIENT = 1e-12
"""Of the model's gradient norm: less is rounding, which Adam scales to the size of any other gradient."""
ROUNDED_NO_GRADIENT = 1e-5
"""The same for a model that computes in float32 inside."""


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


# ---------------------------------------------------------------- the size of a difference


@dataclass(frozen=True)
class ParityDifference:
    """The largest difference of one quantity of one training."""

    training: Comparison
    what: str
    size: float
    bound: float
    factor: float = math.nan
    """The run's value over the plain loop's, if one is a multiple of the other."""

    @property
    def same(self) -> bool:
        return self.size <= self.bound

    def __str__(self) -> str:
        text = f"{self.training}: {self.what} differs by {self.size:.1e}, bound {self.bound:.0e}"
        factor = f": it is {self.factor:.6g} times the plain loop's" if math.isfinite(self.factor) else ""
        return text + factor


@dataclass(frozen=True)
class Measure:
    """Precision of a comparison: the dtype, rounding inside the model, parameters without a gradient."""

    dtype: str
    rounds: str
    adaptive: bool
    flat: frozenset[str]

    @property
    def each(self) -> bool:
        """Whether each parameter is compared by itself; where values are rounded, the whole model is."""
        return self.dtype == "fp64" and not self.rounds

    def bound(self, training: Comparison) -> float:
        if self.dtype == "fp64" and self.rounds:
            return ROUNDED_CONFIGURED if training is Comparison.CONFIGURED else ROUNDED_INSIDE
        wide = ADAPTIVE if self.each and self.adaptive and training is Comparison.CONFIGURED else 1.0
        return wide * BOUNDS[self.dtype]

    def differences(
        self, training: Comparison, ours: TrainingRecord, plain: TrainingRecord
    ) -> list[ParityDifference]:
        """The largest difference of the losses, of the gradient norms, and of the gradients or parameters."""
        bound = self.bound(training)
        return [
            self._of_numbers(training, "loss", ours.losses, plain.losses, bound),
            self._of_numbers(training, "gradient norm", ours.norms, plain.norms, 3 * bound),
            self._of_tensors(training, ours, plain, bound),
        ]

    def _of_numbers(
        self, training: Comparison, name: str, ours: list[float], plain: list[float], bound: float
    ) -> ParityDifference:
        if len(ours) != len(plain):
            return ParityDifference(
                training, f"the number of steps ({len(ours)}, plain loop {len(plain)})", math.inf, bound
            )
        apart = [
            abs(a - b) / max(abs(b), 1e-30) if math.isfinite(a) else math.inf
            for a, b in zip(ours, plain, strict=True)
        ]
        at = max(range(len(apart)), key=apart.__getitem__)
        return ParityDifference(
            training, f"the {name} of step {at + 1}", apart[at], bound, ours[at] / (plain[at] or math.nan)
        )

    def _of_tensors(
        self, training: Comparison, ours: TrainingRecord, plain: TrainingRecord, bound: float
    ) -> ParityDifference:
        length = {Comparison.GRADIENT: FAR, Comparison.CLIPPED: FAR / CLIP}.get(training)
        moved = {
            n: (plain.start[n].double() - b.double()) / (length or 1.0) for n, b in plain.parameters.items()
        }
        found = {n: (plain.start[n].double() - ours.parameters[n].double()) / (length or 1.0) for n in moved}
        kept = [n for n in moved if training is not Comparison.CONFIGURED or n not in self.flat]
        what = "the gradient of" if length else "the parameter"
        if not self.each:
            size = _whole_difference({n: found[n] for n in kept}, {n: moved[n] for n in kept})
            if self.dtype != "fp64" and not length:
                # Relative to the parameters: in half precision a few steps' change has no significant digits.
                size = _whole_difference(ours.parameters, plain.parameters)
            worst = max(kept, key=lambda n: _norm(found[n] - moved[n]), default="")
            return ParityDifference(
                training, f"the model, {what} {worst} most,", size, bound, _factor(found, moved, kept)
            )
        floors = {n: ROUNDING * _norm(plain.start[n].double()) / (length or 1.0) for n in kept}
        apart = relative_differences(found, {n: moved[n] for n in kept}, floors)
        worst = max(kept, key=lambda n: apart[n], default="")
        return ParityDifference(
            training,
            f"{what} {worst}",
            apart.get(worst, 0.0),
            bound,
            _factor(found, moved, [worst] if worst else []),
        )


def relative_differences(
    ours: Mapping[str, Tensor], plain: Mapping[str, Tensor], floors: Mapping[str, float] | None = None
) -> dict[str, float]:
    """‖a - b‖ over the largest of ‖b‖, a thousandth of the whole model's ‖b‖, and the floor."""
    whole = math.sqrt(sum(_norm(b) ** 2 for b in plain.values()))
    found = {}
    for name, b in plain.items():
        apart = _norm(ours[name].double() - b.double())
        scale = max(_norm(b), SMALL * whole, floors[name] if floors else 0.0, 1e-60)
        found[name] = apart / scale if math.isfinite(apart) else math.inf
    return found


def without_gradient(gradients: TrainingRecord, least: float) -> frozenset[str]:
    """Trained parameters whose gradient in the plain loop is only rounding."""
    sizes = {n: _norm(gradients.start[n].double() - b.double()) for n, b in gradients.parameters.items()}
    whole = math.sqrt(sum(size**2 for size in sizes.values()))
    return frozenset(n for n, size in sizes.items() if size and size <= least * whole)


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def _whole_difference(ours: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> float:
    apart = math.sqrt(sum(_norm(ours[n].double() - b.double()) ** 2 for n, b in plain.items()))
    whole = math.sqrt(sum(_norm(b) ** 2 for b in plain.values()))
    return apart / max(whole, 1e-60) if math.isfinite(apart) else math.inf


def _factor(ours: Mapping[str, Tensor], plain: Mapping[str, Tensor], names: list[str]) -> float:
    """ours / plain by least squares; NaN if ours is not a multiple of plain."""
    along = sum(float((ours[n] * plain[n]).sum()) for n in names)
    square = sum(float(plain[n].square().sum()) for n in names)
    if not square or not math.isfinite(along):
        return math.nan
    factor = along / square
    left = sum(_norm(ours[n] - factor * plain[n]) ** 2 for n in names)
    return factor if left <= 1e-4 * square * max(1.0, factor**2) else math.nan
