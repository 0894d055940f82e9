"""The planner's predictions beside real runs: tensor bytes, the process's true peak, torch's tracker,
published speeds.

    python -m bench.plan               56 random runs on CPU (gloo, 1, 2 and 4 ranks), and 8 large ones
    python -m bench.plan --minutes 4   as many as fit in the time; repeat to continue, --again to start over
    python -m bench.plan --short       6 of them; nothing is written
    python -m bench.plan --published   the published rows alone; nothing is run

A prediction is made before its run, from the flags alone. Measured tensor bytes cover every storage that a
real step creates: the least of four steps, the most of all ranks. The true peak is the kernel's count above
the idle process, with malloc set to return freed memory. Results: bench/results/plan.json and plan.md,
plan_published.md.
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.plan_cases import Case, draw, draw_more, large
from bench.plan_published import published_table
from bench.plan_real import Measured, Ranks
from fsdp.rundir.atomic_write import write_atomically

RESULTS = Path(__file__).parent / "results"
MARGIN = 0.03


@dataclass(frozen=True)
class Row:
    case: Case
    predicted: float
    predicted_process: float
    measured: Measured
    torchs: float | None
    """torch's FSDPMemTracker on the same step; None if it does not run."""

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
        """Whether a plan with the margin fits a limit that the run just exceeds: it must not."""
        return self.predicted * (1 + MARGIN) < self.measured.tensors


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--again", action="store_true", help="forget the runs that are kept")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so long; 0 never")
    parser.add_argument("--cases", type=int, default=48)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args(argv)
    if given.published:
        text = "\n".join(published_table())
        print(text)
        (RESULTS / "plan_published.md").write_text(text + "\n", encoding="utf-8")
        return 0
    drawn = draw(random.Random(given.seed), 6 if given.short else given.cases)
    if given.short:
        rows = list(run(drawn))
        print("\n".join(_table(rows)))
        return int(any(row.says_fits_and_does_not for row in rows))
    kept = {} if given.again else _kept()
    until = time.monotonic() + given.minutes * 60 if given.minutes else float("inf")
    drawn += draw_more(random.Random(given.seed + 1), given.cases // 6)
    cases = [*drawn, *large()]
    for row in run([case for case in cases if case not in kept]):
        kept[row.case] = row
        _keep(list(kept.values()))
        if time.monotonic() > until:
            break
    left = sum(case not in kept for case in cases)
    small, big = ([kept[case] for case in some if case in kept] for some in (drawn, large()))
    lines = _memory_text(small, big)
    print("\n".join(lines))
    if left:
        print(f"{left} runs are left: the same command continues.")
    (RESULTS / "plan.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(any(row.says_fits_and_does_not for row in kept.values()))


def run(cases: Sequence[Case]) -> Iterator[Row]:
    with Ranks() as ranks:
        for at, case in enumerate(cases, 1):
            began = time.monotonic()
            predicted, process = ranks.predict(case)
            torchs = ranks.torchs(case)
            row = Row(case, predicted, process, ranks.measure(case), torchs)
            theirs = "-" if row.torchs_error is None else f"{row.torchs_error:+.2%}"
            print(
                f"{at:3d} {case}: {row.measured.tensors / 2**20:.1f} MiB, {row.error:+.2%}; "
                f"process {row.measured.process / 2**20:.0f} MiB, {row.process_error:+.1%}; torch's "
                f"tracker {theirs}; "
                f"{time.monotonic() - began:.1f} s",
                flush=True,
            )
            yield row


# ---------------------------------------------------------------- what is kept


def _keep(rows: list[Row]) -> None:
    kept = {"machine": _machine(), "runs": [{**asdict(row), "error": row.error} for row in rows]}
    write_atomically(RESULTS / "plan.json", json.dumps(kept, indent=1) + "\n")


def _kept() -> dict[Case, Row]:
    try:
        runs = json.loads((RESULTS / "plan.json").read_text(encoding="utf-8"))["runs"]
    except (OSError, KeyError, ValueError):
        return {}
    rows = [
        Row(
            Case(run["case"]["ranks"], tuple(run["case"]["flags"])),
            run["predicted"],
            run["predicted_process"],
            Measured(**run["measured"]),
            run["torchs"],
        )
        for run in runs
    ]
    return {row.case: row for row in rows}


# ---------------------------------------------------------------- tables


def _memory_text(rows: list[Row], big: list[Row]) -> list[str]:
    return [
        f"# Memory: predicted beside measured ({_machine()})",
        "",
        f"`python -m bench.plan`: {len(rows) + len(big)} runs, once each. Bytes are counted: load changes "
        f"none.",
        "",
        *_table(rows),
        "",
        "## 100M parameters and more: the process's true peak above idle",
        "",
        *_big_table(big),
        "",
    ]


def _table(rows: list[Row]) -> list[str]:
    ours = [abs(row.error) for row in rows]
    theirs = [abs(row.torchs_error) for row in rows if row.torchs_error is not None]
    wrong = sum(row.says_fits_and_does_not for row in rows)
    lines = [
        "| run | tensor bytes, MiB | planned | error | torch's FSDPMemTracker |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        other = "does not run" if row.torchs_error is None else f"{row.torchs_error:+.2%}"
        lines.append(
            f"| {row.case} | {row.measured.tensors / 2**20:.2f} | {row.predicted / 2**20:.2f} | "
            f"{row.error:+.3%} | {other} |"
        )
    lines += [
        "",
        f"{len(rows)} runs: median error {statistics.median(ours):.3%}, worst {max(ours):.3%}; said to fit "
        f"at a margin of "
        f"{MARGIN:.0%} and did not: {wrong}.",
    ]
    if theirs:
        lines.append(
            f"torch's FSDPMemTracker on the {len(theirs)} of them that it runs: median "
            f"{statistics.median(theirs):.3%}, "
            f"worst {max(theirs):.3%}."
        )
    return lines


def _big_table(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    lines = ["| run | true peak, MiB | planned | error | tensor bytes, error |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row.case} | {row.measured.process / 2**20:.0f} | {row.predicted_process / 2**20:.0f} "
            f"| {row.process_error:+.2%} "
            f"| {row.error:+.3%} |"
        )
    errors = [abs(row.process_error) for row in rows]
    return [
        *lines,
        "",
        f"{len(rows)} runs: median error {statistics.median(errors):.2%}, worst {max(errors):.2%}.",
    ]


def _machine() -> str:
    import torch

    return f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, gloo"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
