"""Grouped records: past a number of steps one record stands for ten, past ten times as many for a hundred.

A run directory then grows with the logarithm of the steps done, and so does what a report reads. A grouped
record has the step of its last one, means of the numbers, and the extremes that a mean would hide:

    {"step": 100010, "steps": 10, "loss": 2.1, …, "low": {"loss": 1.9, …}, "high": {"loss": 2.4, …}}

Groups end at multiples of their size, at each save (a resume removes the steps after it) and at the end of a
run. A kill loses the group in progress. Evaluations are never grouped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]

GROWTH = 10
"""Steps a record, and how many times as many steps have one size of group."""
EXTREMES = ("loss", "grad_norm", "step_time_s")
PEAKS = ("max_mem_gib",)
"""The largest of a group instead of the mean."""
LAST = ("lr", "epoch")


class StepGroups:
    """Collects the records of steps; `full_records` is the last step with a record of its own, 0 for all."""

    def __init__(self, full_records: int) -> None:
        self._full = full_records
        self._open: list[Record] = []

    def size_at(self, step: int) -> int:
        """How many steps a record of this step stands for."""
        size, until = 1, self._full
        while self._full and step > until:
            size, until = size * GROWTH, until * GROWTH
        return size

    def add(self, record: Record) -> Record | None:
        """The record to write now, or None within a group."""
        size = self.size_at(record["step"])
        if size == 1 and not self._open:
            return record
        self._open.append(record)
        return self.close() if record["step"] % size == 0 or size == 1 else None

    def close(self) -> Record | None:
        """The record of the group in progress, or None without one."""
        group, self._open = self._open, []
        return grouped(group) if len(group) > 1 else (group[0] if group else None)


def grouped(records: list[Record]) -> Record:
    """One record of several steps in order."""
    columns: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.items():
            columns.setdefault(name, []).append(value)
    found: dict[str, Any] = {"step": records[-1]["step"], "steps": len(records)}
    for name, values in columns.items():
        if name != "step":
            found[name] = _one_number(name, values)
    finite = {name: [one for one in columns.get(name, ()) if math.isfinite(one)] for name in EXTREMES}
    found["low"] = {name: min(values) for name, values in finite.items() if values}
    found["high"] = {name: max(values) for name, values in finite.items() if values}
    return found


def _one_number(name: str, values: list[float]) -> float:
    if name in LAST:
        return values[-1]
    if name in PEAKS:
        return max(values)
    if all(value == values[0] for value in values):
        return values[0]  # counts stay whole numbers
    return sum(values) / len(values)
