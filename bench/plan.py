"""The planner's predictions beside real runs: bytes of tensors, the process's true peak, torch's own tracker, published speeds.

    python -m bench.plan               48 real runs on CPU drawn at random (gloo, 1, 2 and 4 ranks), large ones, published rows
    python -m bench.plan --short       8 of them and the published rows
    python -m bench.plan --published   the published rows alone; nothing is run

A prediction is made before its run and from the flags alone. Measured tensor bytes are those of every storage that a real step
makes, of all ranks; the true peak is what the kernel counts above the idle process, with malloc told to give memory back.
Where a CUDA device is, its own counters stand in the table. Results: bench/results/plan.json and plan.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.plan_cases import Case, draw, large
from bench.plan_published import published_table
from bench.plan_real import Measured, Ranks

ROOT = Path(__file__).parents[1]
MARGIN = 0.03


@dataclass(frozen=True)
class Row:
    case: Case
    predicted: float
    predicted_process: float
    measured: Measured
    torchs: float | None
    """What torch's FSDPMemTracker says of the same step; None where it does not run."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured.tensors - 1

    @property
    def process_error(self) -> float:
        return self.predicted_process / self.measured.process - 1

    @property
    def torchs_error(self) -> float | None:
        return None if self.torchs is None else self.torchs / self.measured.tensors - 1

    @property
    def says_fits_and_does_not(self) -> bool:
        """At a limit that the run just exceeds, a plan with the margin must not say that it fits."""
        return self.predicted * (1 + MARGIN) < self.measured.tensors


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--large", action="store_true", help="only the runs of 100M parameters and more")
    parser.add_argument("--cases", type=int, default=48)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args(argv)
    cases = [] if given.published else draw(random.Random(given.seed), 8 if given.short else given.cases)
    big = [] if given.short or given.published else large()
    rows = run([] if given.large else cases)
    big_rows = run(big)
    text = "\n".join([*_memory_text(rows, big_rows), *published_table()])
    print(text)
    if not given.short and not given.published and not given.large:
        _write(text, rows, big_rows)
    return int(any(row.says_fits_and_does_not for row in [*rows, *big_rows]))


def run(cases: list[Case]) -> list[Row]:
    rows = []
    with Ranks() as ranks:
        for at, case in enumerate(cases, 1):
            began = time.monotonic()
            predicted, process = ranks.predict(case)
            torchs = ranks.torchs(case)
            measured = ranks.measure(case)
            row = Row(case, predicted, process, measured, torchs)
            rows.append(row)
            theirs = "-" if row.torchs_error is None else f"{row.torchs_error:+.2%}"
            print(
                f"{at:3d} {case}: {measured.tensors / 2**20:.1f} MiB, {row.error:+.2%}; "
                f"process {measured.process / 2**20:.0f} MiB, "
                f"{row.process_error:+.1%}; torch's tracker {theirs}; {time.monotonic() - began:.1f} s",
                flush=True,
            )
    return rows


# ---------------------------------------------------------------- what is said of them


def _memory_text(rows: list[Row], big: list[Row]) -> list[str]:
    if not rows and not big:
        return []
    lines = [f"## Memory: predicted beside measured ({_machine()})", ""]
    lines += _table(rows) if rows else []
    if big:
        lines += ["", "### 100M parameters and more: the process's true peak above idle", "", *_big_table(big)]
    return [*lines, ""]


def _table(rows: list[Row]) -> list[str]:
    ours = [abs(row.error) for row in rows]
    theirs = [abs(row.torchs_error) for row in rows if row.torchs_error is not None]
    wrong = sum(row.says_fits_and_does_not for row in rows)
    lines = ["| run | tensor bytes, MiB | planned | error | torch's FSDPMemTracker |", "|---|---|---|---|---|"]
    for row in rows:
        other = "does not run" if row.torchs_error is None else f"{row.torchs_error:+.2%}"
        lines.append(
            f"| {row.case} | {row.measured.tensors / 2**20:.2f} | {row.predicted / 2**20:.2f} | {row.error:+.3%} | {other} |"
        )
    lines += [
        "",
        f"{len(rows)} runs: median error {statistics.median(ours):.3%}, worst {max(ours):.3%}; said to fit at a margin of "
        f"{MARGIN:.0%} and did not: {wrong}.",
    ]
    if theirs:
        lines.append(
            f"torch's FSDPMemTracker on the {len(theirs)} of them that it runs: median {statistics.median(theirs):.3%}, "
            f"worst {max(theirs):.3%}."
        )
    return lines


def _big_table(rows: list[Row]) -> list[str]:
    lines = ["| run | true peak, MiB | planned | error | tensor bytes, error |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row.case} | {row.measured.process / 2**20:.0f} | {row.predicted_process / 2**20:.0f} "
            f"| {row.process_error:+.2%} "
            f"| {row.error:+.3%} |"
        )
    errors = [abs(row.process_error) for row in rows]
    return [*lines, "", f"{len(rows)} runs: median error {statistics.median(errors):.2%}, worst {max(errors):.2%}."]


def _machine() -> str:
    import torch

    return f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, gloo"


def _write(text: str, rows: list[Row], big: list[Row]) -> None:
    def plain(row: Row) -> dict[str, Any]:
        return {
            "run": str(row.case), "flags": list(row.case.flags), "ranks": row.case.ranks, "planned": row.predicted,
            "measured": row.measured.tensors, "process": row.measured.process, "process_planned": row.predicted_process,
            "torchs": row.torchs,
        }  # fmt: skip

    place = ROOT / "bench" / "results"
    (place / "plan.md").write_text(text + "\n", encoding="utf-8")
    kept = {"machine": _machine(), "runs": [plain(row) for row in rows], "large": [plain(row) for row in big]}
    (place / "plan.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
