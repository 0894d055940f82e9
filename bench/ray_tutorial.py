"""Ray's FSDP2 tutorial beside `train.py --backend ray`: the same ViT, data and number of workers, each on its
own Ray.

    python -m bench.ray_tutorial            six rounds, some minutes; --short is one

Both are measured from outside in the same way: one line of metrics a step, and the memory of every process
that the command started. They alternate, so that other load affects both. Results are printed and written to
bench/results/ray_tutorial.*.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import processes, tables

ROOT = Path(__file__).parents[1]
STEPS, EVERY = 60, 20
LOOK_S = 0.004
WEIGH_EVERY = 50  # looks: memory is read five times a second


@dataclass(frozen=True)
class Seen:
    """One run of one side."""

    first_step_s: float
    steps_per_s: float
    checkpoint_s: float
    peak_gib: float


class Watch:
    """Observes a command from start to end: the time of each line, and the peak memory of its processes
    together.
    """

    def __init__(self, command: Sequence[str], lines: Path) -> None:
        self._lines = lines
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        self._began = time.monotonic()
        self._log = lines.parents[1] / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        self._came: list[float] = []
        self._peak = 0

    def to_the_end(self) -> Seen:
        looks = 0
        while self._process.poll() is None:
            self._count_lines()
            if looks % WEIGH_EVERY == 0:
                self._peak = max(
                    self._peak, sum(processes.pss_bytes(pid) for pid in _tree(self._process.pid))
                )
            looks += 1
            time.sleep(LOOK_S)
        if self._process.returncode:
            raise SystemExit(
                f"{self._process.args!r} ended with "
                f"{self._process.returncode}:\n{self._log.read_text()[-2500:]}"
            )
        return self._told()

    def _count_lines(self) -> None:
        if self._lines.exists():
            there = self._lines.read_bytes().count(b"\n")
            self._came += [time.monotonic() - self._began] * (there - len(self._came))

    def _told(self) -> Seen:
        gaps = [after - before for before, after in zip(self._came, self._came[1:], strict=False)][
            : STEPS - 1
        ]
        # a save is between its step's line and the next one's
        saving = [gaps[at - 1] for at in range(EVERY, STEPS, EVERY)]
        plain = [gap for at, gap in enumerate(gaps, start=1) if at % EVERY]
        usual = statistics.median(plain)
        return Seen(self._came[0], 1 / usual, statistics.mean(saving) - usual, self._peak / 2**30)


def _tree(root: int) -> set[int]:
    """A process and all under it; Ray's daemons are the driver's children, its workers the raylet's."""
    parents = processes.parents()
    found, more = set[int](), {root}
    while more:
        found |= more
        more = {pid for pid, parent in parents.items() if parent in found} - found
    return found


def tutorial(folder: Path) -> Seen:
    command = [
        sys.executable,
        "-m",
        "bench.ray_peer",
        str(folder),
        "--steps",
        str(STEPS),
        "--every",
        str(EVERY),
    ]
    return Watch(command, folder / "rank-0.jsonl").to_the_end()


def ours(folder: Path) -> Seen:
    flags = [
        "--train.steps",
        str(STEPS),
        "--checkpoint.every_steps",
        str(EVERY),
        "--checkpoint.export",
        "false",
    ]
    command = [sys.executable, "train.py", "--backend", "ray", "--run.dir", str(folder), *flags]
    return Watch(command, folder / "metrics.jsonl").to_the_end()


def measure(rounds: int) -> dict[str, list[Seen]]:
    seen: dict[str, list[Seen]] = {"tutorial": [], "ours": []}
    for number in range(rounds):
        sides = [("tutorial", tutorial), ("ours", ours)]
        for name, run in sides if number % 2 == 0 else sides[::-1]:
            with tempfile.TemporaryDirectory(prefix="bench-ray-", dir="/tmp") as place:
                seen[name].append(run(Path(place, "run")))
            print(f"round {number + 1}, {name}: {seen[name][-1]}", flush=True)
    return seen


COLUMNS = {
    "first_step_s": "command to first step, s",
    "steps_per_s": "steps/s",
    "checkpoint_s": "a checkpoint costs, s",
    "peak_gib": "peak host memory, GiB",
}


def table(seen: dict[str, list[Seen]]) -> str:
    rows = [
        [name, *(tables.spread([getattr(run, key) for run in runs]) for key in COLUMNS)]
        for name, runs in seen.items()
    ]
    over = [
        tables.ratio(
            [getattr(one, key) for one in seen["ours"]], [getattr(one, key) for one in seen["tutorial"]]
        ).judged(more_is_better=key == "steps_per_s")
        for key in COLUMNS
    ]
    return tables.table(["", *COLUMNS.values()], [*rows, ["ours/tutorial", *over]])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=0, help="0 is 6, or 1 with --short")
    parser.add_argument("--add", action="store_true", help="to the rounds that were taken before")
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("ray") is None:
        print("Ray's tutorial: not run, ray is not installed. HINT: pip install 'ray[train]'")
        return 0
    before = tables.standing("ray_tutorial", short=options.short) if options.add else {}
    version = importlib.metadata.version("ray")
    about = f"{tables.machine()}; Ray {version}, 2 workers, the default ViT on the digits, CPU"
    seen = measure(options.rounds or (1 if options.short else 6))
    if before:
        seen = {name: [Seen(**one) for one in before["runs"][name]] + more for name, more in seen.items()}
        about = tables.joined(before["about"], about)
    print(
        tables.write(
            "ray_tutorial",
            title="Beside Ray's FSDP2 tutorial",
            about=about,
            text=table(seen),
            numbers={"runs": seen},
            command=f"python -m bench.ray_tutorial --rounds {len(seen['ours'])}",
            short=options.short,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
