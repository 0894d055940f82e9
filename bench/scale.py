"""Cost against the number of ranks, parameters and steps done.

    python -m bench.scale                        everything: parameters take 2.5 minutes a round
    python -m bench.scale --part plan            that part alone; the other tables stay
    python -m bench.scale --short

Ranks: a small decoder whose step is mostly the host's work, at 1, 2, 4 and 8 ranks of one thread each. That
is more ranks than cores, so processor time is measured, not wall time. Parameters: 1M to 100M on 2 ranks
under launch.local, started, stepped, saved. Steps: bench/steps_done.py. Plan: bench/scale_costs.py.
A table's last row is the slope of log cost over log size.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import tables
from bench.launched import Launched
from bench.peers.team import HONEST, Team
from bench.peers.work import COMMON, decoder
from bench.scale_costs import PLANNED, by_plan
from bench.steps_done import by_steps

TURN, WARM = 20, 5
SAVE_EVERY, STEPS = 6, 24
SIZES = {"1M": (96, 4, 1024), "10M": (320, 6, 4096), "30M": (512, 8, 8192), "100M": (768, 12, 19_968)}
STEPS_DONE = (10**3, 10**4, 10**5, 10**6)


# ---------------------------------------------------------------- ranks


def by_ranks(counts: Sequence[int], rounds: int) -> tuple[str, dict[str, Any]]:
    numbers: dict[str, dict[str, list[float]]] = {}
    for ranks in counts:
        seen: dict[str, list[float]] = {"bare": [], "ours": []}
        with Team("bare", "tiny", ranks) as bare, Team("ours", "tiny", ranks) as own:
            teams = {"bare": bare, "ours": own}
            for team in teams.values():
                team.steps(WARM)
            for nth in range(rounds):
                for name in tables.turned(list(teams), nth):
                    seen[name].append(1e3 * teams[name].steps(TURN)["cpu_s"])
        numbers[str(ranks)] = seen
        print(f"{ranks} ranks: {seen}", flush=True)
    return ranks_table(numbers), numbers


def ranks_table(numbers: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    rows = []
    for ranks, seen in numbers.items():
        more = tables.difference(seen["ours"], seen["bare"])
        over = more.judged("+.2f", more_is_better=False, same=0.0)
        rows.append([ranks, tables.spread(seen["ours"]), tables.spread(seen["bare"]), over])
    if len(numbers) > 1:
        both = ([statistics.median(seen[name]) for seen in numbers.values()] for name in ("ours", "bare"))
        counts = [float(ranks) for ranks in numbers]
        rows.append([tables.SLOPE, *(f"{tables.slope(counts, costs):.2f}" for costs in both), ""])
    columns = ["ranks", "shardrun, processor ms a step and rank", "bare loop", "shardrun over bare, ms [95%]"]
    return tables.table(columns, rows)


# ---------------------------------------------------------------- parameters


def by_parameters(names: Sequence[str], rounds: int) -> tuple[str, dict[str, Any]]:
    numbers: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for nth in range(rounds):
        for name in tables.turned(list(names), nth):
            numbers[name].append(one_run(SIZES[name]))
            print(f"{name}: {numbers[name][-1]}", flush=True)
    return parameters_table(numbers), numbers


def parameters_table(numbers: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    keys = ("first_s", "step_s", "save_s", "peak_mib")
    rows = [
        [name, *(tables.spread([one[key] for one in runs]) for key in keys)] for name, runs in numbers.items()
    ]
    sizes, runs = [float(name.removesuffix("M")) for name in numbers], list(numbers.values())
    if len(sizes) > 1:
        rows.append([tables.SLOPE, *(tables.slope_of(sizes, runs, key) for key in keys)])
    columns = ["parameters", "command to first step, s", "step, s", "a save adds, s", "peak of a rank, MiB"]
    return tables.table(columns, rows)


def one_run(size: tuple[int, int, int]) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as place:
        flags = [*COMMON, *decoder(*size, "true"), "--data.seq_len", "16", "--train.global_batch", "4"]
        flags += ["--run.dir", str(Path(place, "run")), "--checkpoint.every_steps", str(SAVE_EVERY)]
        flags += ["--train.steps", str(STEPS)]
        command = [sys.executable, "-m", "launch.local", "--ranks", "2", "--restarts", "0", *flags]
        run = Launched(command, Path(place, "log"), HONEST)
        _, status, usage = os.wait4(run.process.pid, 0)
        if status:
            raise SystemExit(f"{' '.join(command)} ended with {status}:\n{run.log.read_text()[-2000:]}")
        run.heard()
        return told(run.steps) | {"peak_mib": usage.ru_maxrss / 1024}


def told(steps: Sequence[tuple[float, int]]) -> dict[str, float]:
    """A save is between its step's line and the next one's."""
    gaps = {step: after - before for (before, step), (after, _) in itertools.pairwise(steps)}
    usual = statistics.median(gap for step, gap in gaps.items() if step % SAVE_EVERY and step > 2)
    saving = [gap for step, gap in gaps.items() if step % SAVE_EVERY == 0]
    return {"first_s": steps[0][0], "step_s": usual, "save_s": statistics.median(saving) - usual}


PARTS = {
    "ranks": "Host time a step against ranks, one thread each",
    "parameters": "Start, step, save and memory against parameters, 2 ranks",
    "steps": "A resume and a report against steps done, 1 rank",
    "plan": "A plan against parameters and ranks",
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=list(PARTS))
    parser.add_argument("--rounds", type=int, default=0, help="0 is 6, or 2 with --short")
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args(argv)
    rounds, small = options.rounds or (2 if options.short else 6), options.short
    for part in [options.part] if options.part else list(PARTS):
        about = tables.machine()
        if part == "ranks":
            text, numbers = by_ranks((1, 2, 4) if small else (1, 2, 4, 8), rounds)
        elif part == "parameters":
            text, numbers = by_parameters(list(SIZES)[:2] if small else list(SIZES), 1 if small else rounds)
        elif part == "steps":
            text, numbers = by_steps(STEPS_DONE[:2] if small else STEPS_DONE, 1 if small else rounds)
        else:
            text, numbers = by_plan(1 if small else rounds, PLANNED[:2] if small else PLANNED)
        print(f"\n{PARTS[part]}\n\n{text}\n", flush=True)
        tables.write_piece(
            "scale",
            part,
            short=small,
            title="How cost grows",
            piece_title=PARTS[part],
            about=about,
            text=text,
            notes="",
            command=f"python -m bench.scale --part {part} --rounds {rounds}" + " --short" * small,
            numbers={"numbers": numbers},
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
