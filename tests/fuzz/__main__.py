"""Fuzz the readers of what may be odd: flags, recipes, files of a run directory:

    python -m tests.fuzz --seconds 600                     all targets in turn
    python -m tests.fuzz --only "line files" --seed 7      one of them, the same inputs for one seed

A broken promise is printed with the smallest input that breaks it; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, given, settings

from tests.fuzz.targets import TARGETS, Target, scratch

ROUND = 200
"""Inputs of one target before the next one's turn."""


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    names = [name for name in TARGETS if options.only in name]
    if not names:
        raise SystemExit(f"no target's name contains {options.only!r}. HINT: one of {', '.join(TARGETS)}")
    counts, began, seed = Counter[str](), time.monotonic(), options.seed
    broken: list[str] = []
    print(f"seed {seed}, {options.seconds:.0f} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        while names and time.monotonic() - began < options.seconds:
            for name in list(names):
                if time.monotonic() - began >= options.seconds and counts:
                    break
                try:
                    counts[name] += fuzz(TARGETS[name], Path(folder), ROUND, seed=seed)
                except Exception:  # any: that is what is searched
                    print(f"BROKEN {name}, seed {seed}:\n{traceback.format_exc()}", flush=True)
                    broken.append(name)
                    names.remove(name)
            seed += 1
    for name, count in counts.items():
        print(f"{count:8d}  {name}{'  BROKEN' if name in broken else ''}")
    print(f"{counts.total()} inputs in {time.monotonic() - began:.0f} s, seeds {options.seed} to {seed - 1}")
    return 1 if broken else 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--only", default="", help=f"targets whose name contains this: {', '.join(TARGETS)}")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 30), help="of the first round")
    return parser.parse_args(argv)


def fuzz(target: Target, place: Path, examples: int, seed: int | None = None) -> int:
    """Check so many inputs, the same ones at every call for a seed, or without one; returns how many ran."""
    ran = 0

    def check(**values: Any) -> None:
        nonlocal ran
        ran += 1
        with scratch(place / "scratch") as run:
            target.check(run, **values)

    rules: Callable[..., Any] = settings(
        max_examples=examples,
        derandomize=seed is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    test = rules(given(**target.inputs())(check))
    (test if seed is None else hypothesis.seed(seed)(test))()
    return ran


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
