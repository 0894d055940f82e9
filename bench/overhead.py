"""Cost of the step loop: shardrun's loop beside hand-written fully_shard loops, each in processes of its own.

    python -m bench.overhead [--ranks 4] [--rounds 60] [--short] [--profile]

All have the same model, units, weights, samples, optimizer and threads; they take turns of some steps, in an
order that rotates from round to round. Differences are taken within a round. The hand-written loops are
bench/peers/bare.py, as the pages of PyTorch show it, and bench/peers/expert.py, which clips and updates local
shards; both receive batches made beforehand and write nothing. shardrun's reads its data, weighs the loss by
tokens, votes on stopping, checks for non-finite numbers, and writes metrics.jsonl and TensorBoard events at
every step. --profile prints where rank 0 of shardrun's spends its time.
"""

from __future__ import annotations

import argparse
import pstats
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import tables
from bench.peers.roster import ROSTER
from bench.peers.work import WORKS
from bench.train import TURN, Seen, measure

SAME_UNITS = ("--mesh.wrap", "class:Block")
"""As the hand-written loops cut the model. By itself ours gathers embedding and head apart from the root."""
NAMES = ("bare", "expert", "ours")
WRITTEN = NAMES[:-1]
HOST_BAR_US, THROUGHPUT_BAR = 100.0, 0.995
ROUNDS = {"tiny": 100, "100m": 16}
SHORT = {"tiny": 12, "100m": 3}


def figures(seen: Mapping[str, Seen]) -> dict[str, Any]:
    """Medians of each, and shardrun's against each hand-written loop; with all rounds."""

    def micros(seconds: Sequence[float]) -> list[float]:
        return [1e6 * one for one in seconds]

    ours = seen["ours"]
    against = {
        name: {
            "extra_wall_us": tables.difference(micros(ours.wall_s), micros(seen[name].wall_s)),
            "extra_cpu_us": tables.difference(micros(ours.cpu_s), micros(seen[name].cpu_s)),
            "throughput": tables.ratio(seen[name].wall_s, ours.wall_s),
        }
        for name in WRITTEN
    }
    rounds = {
        name: {"wall_s": one.wall_s, "cpu_s": one.cpu_s, "faults": one.faults} for name, one in seen.items()
    }
    return {"against": against, "rounds": rounds}


def rows(work: str, one: Mapping[str, Any]) -> list[list[str]]:
    """A row for each hand-written loop."""
    return [_row(work, name, against, one["rounds"]) for name, against in one["against"].items()]


def _row(work: str, name: str, against: Mapping[str, Any], rounds: Mapping[str, Any]) -> list[str]:
    extra, ratio, both = against["extra_wall_us"], against["throughput"], (rounds[name], rounds["ours"])
    if work == "tiny":
        bar = f"at most {HOST_BAR_US:.0f} µs: {'yes' if extra.value <= HOST_BAR_US else 'no'}"
    else:
        bar = f"at least {THROUGHPUT_BAR}: {'yes' if ratio.value >= THROUGHPUT_BAR else 'no'}"
    return [
        WORKS[work].what,
        ROSTER[name].label,
        str(len(rounds["ours"]["wall_s"])),
        *(f"{1e3 * statistics.median(one['wall_s']):.2f}" for one in both),
        extra.judged(".0f", more_is_better=False, same=0.0),
        against["extra_cpu_us"].judged(".0f", more_is_better=False, same=0.0),
        ratio.judged(),
        bar,
        " and ".join(f"{statistics.median(one['faults']):,.0f}" for one in both),
    ]


HEADS = (
    "",
    "beside",
    "rounds",
    "its ms a step",
    "ours",
    "difference, µs",
    "processor µs a rank",
    "throughput ratio",
    "bar",
    "page faults a step, its and ours",
)


def profile(work: str, ranks: int, rounds: int) -> None:
    """Profiles shardrun's loop on rank 0, alone: its times are longer than without."""
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        place = Path(folder, "profile")
        environment = {"BENCH_PROFILE": str(place)}
        measure(work, ranks, ("bare", "ours"), rounds, 1, flags=SAME_UNITS, environment=environment)
        stats = pstats.Stats(str(place)).sort_stats("tottime")
        stats.print_stats(30)
        stats.print_stats("/(fsdp|launch)/(?!.*_fully_shard)", 40)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=0, help="of the tiny model; the large one takes a fifth, 6 at least"
    )
    parser.add_argument("--ranks", type=int, default=4, help="of each; the large model has 2 GiB a rank")
    parser.add_argument("--work", choices=list(ROUNDS), help="one model alone; nothing is written")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print what rank 0's loop spends its time on")
    options = parser.parse_args(argv)
    about, numbers, lines = tables.machine(), dict[str, Any](), list[list[str]]()
    for work in [options.work] if options.work else list(ROUNDS):
        rounds = SHORT[work] if options.short else ROUNDS[work]
        if options.rounds:
            rounds = options.rounds if work == "tiny" else max(tables.LEAST_ROUNDS, options.rounds // 5)
        if options.profile:
            profile(work, options.ranks, rounds)
            continue
        numbers[work] = figures(measure(work, options.ranks, NAMES, rounds, 1, flags=SAME_UNITS))
        lines += rows(work, numbers[work])
        print("\n".join("  ".join(line) for line in lines[-len(WRITTEN) :]), flush=True)
    if options.profile:
        return 0
    text = tables.table(HEADS, lines)
    if not options.work:
        tables.write(
            "overhead",
            title="What the step loop costs",
            command=f"python -m bench.overhead --ranks {options.ranks}"
            f"{f' --rounds {options.rounds}' if options.rounds else ''}",
            short=options.short,
            about=f"{about}. {options.ranks} ranks, gloo, one thread each, turns of {TURN['tiny']} steps and "
            f"{TURN['100m']}; medians over rounds, with the 95% interval of the median.",
            text=text,
            numbers=numbers,
        )
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
