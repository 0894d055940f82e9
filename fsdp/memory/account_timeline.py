"""Memory over time: events of blocks by kind, and peaks by phase.

A block's kind may be known only after its release (a reduce-scatter's output becomes gradients), so events
are kept and evaluated at the end. Filled by account_storages.py and account_cuda.py; independent of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Mark:
    """Start of a phase."""

    time_s: float
    phase: str
    step: int


@dataclass
class Peak:
    """The highest moment of an interval."""

    bytes: int = 0
    step: int = 0
    phase: str = ""
    kinds: Mapping[str, int] = field(default_factory=dict)

    def as_record(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "step": self.step, "phase": self.phase, "kinds": dict(self.kinds)}


@dataclass(frozen=True)
class Moment:
    """Memory after an event or, with a mark, at the start of a phase."""

    time_s: float
    total: int
    kinds: dict[str, int]  # one dict that each moment changes: copy what is kept
    mark: Mark | None = None


class Timeline:
    """Events in order: a block grows or shrinks, or a phase starts."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self.kinds = tuple(kinds)
        self.kind_of: list[str] = []
        self._events: list[tuple[float, int, int] | Mark] = []  # (time, block, change in bytes)

    def block(self, kind: str) -> int:
        """The number of a new block; its kind may be corrected later in `kind_of`."""
        self.kind_of.append(kind)
        return len(self.kind_of) - 1

    def change(self, time_s: float, block: int, by: int) -> None:
        if by:
            self._events.append((time_s, block, by))

    def mark(self, mark: Mark) -> None:
        self._events.append(mark)

    def moments(self) -> Iterator[Moment]:
        kinds, total = dict.fromkeys(self.kinds, 0), 0
        for event in self._events:
            if isinstance(event, Mark):
                yield Moment(event.time_s, total, kinds, event)
                continue
            time_s, block, by = event
            kinds[self.kind_of[block]] += by
            total += by
            yield Moment(time_s, total, kinds)


def peaks_by_phase(timeline: Timeline) -> dict[str, Peak]:
    """The highest moment of each phase over all steps, the moment of its start included."""
    peaks: dict[str, Peak] = {}
    phase, step = "", 0
    for moment in timeline.moments():
        if moment.mark is not None:
            phase, step = moment.mark.phase, moment.mark.step
        if phase and (phase not in peaks or moment.total > peaks[phase].bytes):
            peaks[phase] = Peak(moment.total, step, phase, dict(moment.kinds))
    return peaks


def ends_of_phases(timeline: Timeline) -> list[dict[str, Any]]:
    """Memory by kind at the end of each phase, which is the start of the next."""
    ends: list[dict[str, Any]] = []
    before: Mark | None = None
    for moment in timeline.moments():
        if moment.mark is not None:
            if before is not None:
                ends.append({"step": before.step, "phase": before.phase, "kinds": dict(moment.kinds)})
            before = moment.mark
    return ends
