"""How far one mesh's trainings are from the plain loop's, what is furthest, and why that may be.

A parameter's gradient is measured against its own size, or a thousandth of the model's where it is smaller:
the bias of attention's keys has no gradient by mathematics, and what is left of it is rounding. A parameter
after training is measured against the length of its path in the same way.

Not here: from which flags either side trains (asked.py), or the loops (plain.py, ranks.py).
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
"""Of the model's size: a parameter's difference is measured against no less."""
ROUNDING = 1e-5
"""Of a parameter's own size: a shorter path than this is not told from rounding."""
ADAPTIVE = 1e4
"""Adam divides by what may be rounding alone, beside an eps of 1e-8: its bound is so many times wider."""
ROUNDED_INSIDE, ROUNDED_ASKED = 1e-5, 1e-2
"""The bounds of a model that computes in float32 inside: of gradients and SGD, and of what the run's own
optimizer makes.
"""
NO_GRADIENT = 1e-12
"""Of the model's gradient norm: less is rounding, which Adam makes as large as any other gradient."""
ROUNDED_NO_GRADIENT = 1e-5
"""The same in a model that computes in float32 inside."""


@dataclass(frozen=True)
class ParityDifference:
    """The furthest of what one training compares."""

    training: Comparison
    what: str
    size: float
    bound: float
    factor: float = math.nan
    """Ours over the plain loop's, where one number says it."""

    @property
    def same(self) -> bool:
        return self.size <= self.bound

    def __str__(self) -> str:
        said = f"{self.training}: {self.what} differs by {self.size:.1e}, bound {self.bound:.0e}"
        return said + (
            f": it is {self.factor:.6g} times the plain loop's" if math.isfinite(self.factor) else ""
        )


@dataclass(frozen=True)
class Measure:
    """How exact a comparison can be: the dtype, what the model rounds inside, and which parameters have no
    gradient.
    """

    dtype: str
    rounds: str
    adaptive: bool
    flat: frozenset[str]

    @property
    def each(self) -> bool:
        """Each parameter by itself; where values are rounded, the whole model."""
        return self.dtype == "fp64" and not self.rounds

    def bound(self, training: Comparison) -> float:
        if self.dtype == "fp64" and self.rounds:
            return ROUNDED_ASKED if training is Comparison.ASKED else ROUNDED_INSIDE
        wide = ADAPTIVE if self.each and self.adaptive and training is Comparison.ASKED else 1.0
        return wide * BOUNDS[self.dtype]

    def differences(
        self, training: Comparison, ours: TrainingRecord, plain: TrainingRecord
    ) -> list[ParityDifference]:
        """Of the losses, the gradient norms, and the gradients or parameters: the furthest of each."""
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
                training, f"the number of steps ({len(ours)}, plainly {len(plain)})", math.inf, bound
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
        kept = [n for n in moved if training is not Comparison.ASKED or n not in self.flat]
        what = "the gradient of" if length else "the parameter"
        if not self.each:
            size = _whole_difference({n: found[n] for n in kept}, {n: moved[n] for n in kept})
            if self.dtype != "fp64" and not length:
                # Against the parameters: half precision leaves a path of a few steps no digits.
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
    """‖a - b‖ over ‖b‖, or over a thousandth of the whole model's ‖b‖ or the floor where that is more."""
    whole = math.sqrt(sum(_norm(b) ** 2 for b in plain.values()))
    found = {}
    for name, b in plain.items():
        apart = _norm(ours[name].double() - b.double())
        scale = max(_norm(b), SMALL * whole, floors[name] if floors else 0.0, 1e-60)
        found[name] = apart / scale if math.isfinite(apart) else math.inf
    return found


def without_gradient(gradients: TrainingRecord, least: float) -> frozenset[str]:
    """Trained parameters whose gradient in the plain loop is rounding."""
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
    """By which number the plain loop's would have to be multiplied; none where ours is no multiple of it."""
    along = sum(float((ours[n] * plain[n]).sum()) for n in names)
    square = sum(float(plain[n].square().sum()) for n in names)
    if not square or not math.isfinite(along):
        return math.nan
    factor = along / square
    left = sum(_norm(ours[n] - factor * plain[n]) ** 2 for n in names)
    return factor if left <= 1e-4 * square * max(1.0, factor**2) else math.nan
