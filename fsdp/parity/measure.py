"""Differences between one mesh's trainings and the plain loop's: the largest of each kind, and its bound.

A gradient's difference is relative to its norm, or to a thousandth of the model's norm if that is larger: the
bias of attention's keys has mathematically no gradient, only rounding. The difference of a trained parameter
is relative to its change in the same way.

Not here: the flags of either side (options.py), or the loops (reference.py, ranks.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp.parity.options import BOUNDS, CLIP, FAR, Comparison
from fsdp.parity.reference import TrainingRecord

if TYPE_CHECKING:
    from torch import Tensor

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
