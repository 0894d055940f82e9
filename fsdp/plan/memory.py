"""Memory of a step on a device: the peak, by kind and by phase, and what a caching allocator reserves for it.

Not here: how the bytes were counted (tracker.py), the allocator's rules (allocator.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from fsdp.plan.fake_runs import TracedStep
from fsdp.plan.trace import COLUMN, HOST_KINDS, KINDS, POOLS, Segment

MIB = 1 << 20
OFFLOADED = KINDS.index("offloaded")
_NOTHING_BACK = (("before", 0), ("end", 1))
"""Places of the head and of the last unit, which stayed on the device."""


@dataclass(frozen=True)
class Memory:
    peak: float
    """Bytes of tensors alive at once on the device, with the allocator's rounding."""
    reserved: float
    """Bytes that the allocator reserves for them, approximately."""
    kinds: Mapping[str, float]
    """The peak's parts."""
    phases: Mapping[str, float]
    """The peak of each phase."""
    where: str
    resting: float
    """Between steps."""
    host: float
    """Offloaded bytes in the host's memory."""
    state: float
    """Parameters and optimizer: what a checkpoint takes from this rank."""

    def with_more(self, size: float) -> Memory:
        """With `size` bytes of inputs that are always present."""
        return replace(
            self,
            peak=self.peak + size,
            reserved=self.reserved + size,
            resting=self.resting + size,
            kinds={**self.kinds, "buffers": self.kinds["buffers"] + size},
            phases={name: highest + size for name, highest in self.phases.items()},
        )


def memory_of(counted: TracedStep, *, apart: bool = False, offload: bool = False) -> Memory:
    """`apart`: host memory is not the device's; `offload`: states are on the host."""
    host = ("offloaded", *(HOST_KINDS if offload else ())) if apart else ()
    mask = np.array([name not in host for name in KINDS])
    unit = max(float(s.curve[:, OFFLOADED].max()) for s in counted.trace.segments) / max(
        1, counted.trace.blocks - 1
    )
    curves = [(_on_device(segment, mask, unit), segment) for segment in counted.trace.segments]
    peaks = [(curve[curve.sum(1).argmax()], segment) for curve, segment in curves]
    pools = [segment.curve[:, [COLUMN[name] for name in POOLS]] for _, segment in curves]
    computation = max(
        float((curve.sum(1) - pool.sum(1)).max()) for (curve, _), pool in zip(curves, pools, strict=True)
    )
    apart_pools = float(np.max([pool.max(0) for pool in pools], axis=0).sum())
    at, segment = max(peaks, key=lambda pair: float(pair[0].sum()))
    phases: dict[str, float] = {}
    for kinds, one in peaks:
        phases[one.name.phase] = max(phases.get(one.name.phase, 0.0), float(kinds.sum()))
    last = counted.trace.segments[-1].curve[-1, : len(KINDS)]
    peak = float(at.sum())
    return Memory(
        peak=peak,
        reserved=max(peak, (computation + apart_pools) * counted.trace.packing),
        kinds=dict(zip(KINDS, at.tolist(), strict=True)),
        phases=phases,
        where=describe(segment, counted.trace.blocks),
        resting=float(last[mask].sum()),
        host=max(float(s.curve[:, : len(KINDS)][:, ~mask].sum(1).max()) for s in counted.trace.segments),
        state=float(last[[KINDS.index("parameters"), KINDS.index("optimizer")]].sum()),
    )


def _on_device(segment: Segment, mask: np.ndarray, unit: float) -> np.ndarray:
    curve = segment.curve[:, : len(KINDS)] * mask
    if not mask[OFFLOADED] and segment.name.phase == "backward" and segment.name.place not in _NOTHING_BACK:
        # Two units' copies at most are back on the device: the one that is used, and the next.
        curve[:, KINDS.index("activations")] += np.minimum(segment.curve[:, OFFLOADED], 2 * unit).astype(
            curve.dtype
        )
    return np.asarray(curve)


def describe(segment: Segment, blocks: int) -> str:
    kind, at = segment.name.place
    block = at if kind == "start" else blocks - at + 1
    place = {"before": "before the blocks", "after": "after them"}.get(kind, f"block {block} of {blocks}")
    if segment.name.phase == "backward" and kind == "before":
        place = "what follows the blocks"
    return (
        f"{segment.name.phase}, {place}"
        if segment.name.phase in ("forward", "backward")
        else segment.name.phase
    )


BESIDE_TENSORS = 5 * MIB
"""Bytes that Python and torch take for a model's own objects, its graph and its threads."""


def process_peak(counted: TracedStep) -> float:
    """On CPU: the process's peak above its idle size, as the kernel counts it."""
    curves = [segment.curve for segment in counted.trace.segments]
    # The heap is as large as it ever was: it counts at its own peak, the other tensors at theirs.
    mapped = max(float((_resident(curve) - curve[:, COLUMN["heap"]]).max()) for curve in curves)
    heap, kept = (max(float(curve[:, COLUMN[name]].max()) for curve in curves) for name in ("heap", "kept"))
    return mapped + heap + kept + BESIDE_TENSORS


def _resident(curve: np.ndarray) -> np.ndarray:
    """Tensors and workspace."""
    return np.asarray(curve[:, : COLUMN["workspace"] + 1].sum(1))
