"""The planner's predictions beside real runs: tensor bytes.

    python -m bench.plan               56 random runs on CPU (gloo, 1, 2 and 4 ranks)
    python -m bench.plan --short       6 of them; nothing is written

A prediction is made before its run, from the flags alone. Measured tensor bytes cover every storage that a
real step creates: the least of four steps, the most of all ranks. Results: bench/results/plan.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.plan_cases import Case, draw, draw_more
from bench.plan_real import Ranks

RESULTS = Path(__file__).parent / "results"
MARGIN = 0.03


@dataclass(frozen=True)
class Row:
    """Bytes of the rank with most."""

    case: Case
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def says_fits_and_does_not(self) -> bool:
        """Whether a plan with the margin fits a limit that the run just exceeds: it must not."""
        return self.predicted * (1 + MARGIN) < self.measured


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--cases", type=int, default=48)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args(argv)
    cases = draw(random.Random(options.seed), 6 if options.short else options.cases)
    if not options.short:
        cases += draw_more(random.Random(options.seed + 1), options.cases // 6)
    rows = list(run(cases))
    lines = [*heading(), *table(rows)]
    print("\n".join(lines))
    if not options.short:
        (RESULTS / "plan.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(any(row.says_fits_and_does_not for row in rows))


def run(cases: Sequence[Case]) -> Iterator[Row]:
    with Ranks() as ranks:
        for number, case in enumerate(cases, 1):
            began = time.monotonic()
            row = Row(case, ranks.predict(case), ranks.measure(case))
            seconds = time.monotonic() - began
            print(f"{number:3d} {case}: {row.error:+.2%}, {seconds:.1f} s", file=sys.stderr, flush=True)
            yield row


def heading() -> list[str]:
    import torch

    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, gloo"
    return [f"# Memory: predicted beside measured ({machine})", "", "`python -m bench.plan`, once each.", ""]


def table(rows: Sequence[Row]) -> list[str]:
    ours = [abs(row.error) for row in rows]
    wrong = sum(row.says_fits_and_does_not for row in rows)
    lines = ["| run | tensor bytes, MiB | planned | error |", "|---|---|---|---|"]
    for row in rows:
        sizes = f"{row.measured / 2**20:.2f} | {row.predicted / 2**20:.2f}"
        lines.append(f"| {row.case} | {sizes} | {row.error:+.3%} |")
    lines += [
        "",
        f"{len(rows)} runs: median error {statistics.median(ours):.3%}, worst {max(ours):.3%}; said to fit "
        f"at a margin of {MARGIN:.0%} and did not: {wrong}.",
    ]
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
