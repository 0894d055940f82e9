"""Cost of the step loop: shardrun's loop beside a hand-written fully_shard loop in the same processes.

    python -m bench.overhead [--rounds 60] [--short] [--profile]      about two minutes with four free cores

Both have the same model, units, weights, samples and optimizer in one process group, and alternate: some
steps of one, as many of the other. Differences are taken within a round. The hand-written loop
(bench/peers/bare.py) also clips, receives batches made beforehand, and writes nothing. shardrun's reads its
data, weighs the loss by tokens, votes on stopping, checks for non-finite numbers, and writes metrics.jsonl
and TensorBoard events at every step. --profile prints where it spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import multiprocessing
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench import tables

RANKS = 4
SAME_UNITS = ("--mesh.wrap", "class:Block")
"""As the hand-written loop cuts the model. By itself ours gathers embedding and head apart from the root."""
HOST_BAR_US, THROUGHPUT_BAR = 100.0, 0.995
TURN = {"tiny": 10, "100m": 1}
ROUNDS = {"tiny": 100, "100m": 16}
SHORT = {"tiny": 12, "100m": 3}
WARM = 2


@dataclass
class Clock:
    """Seconds of each turn, by contender."""

    turn: int
    rounds: int
    wall_s: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "bare": []})
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "bare": []})

    def start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def stop(self, whose: str) -> None:
        self.cpu_s[whose].append((time.process_time() - self._cpu) / self.turn)
        self.wall_s[whose].append((time.perf_counter() - self._wall) / self.turn)


class Turns:
    """The Reporter of shardrun's run: after each of its turns it runs a turn of the other, at the same place
    of every step.
    """

    def __init__(self, other: Any, batches: Any, clock: Clock, profile: cProfile.Profile | None) -> None:
        self._other, self._batches, self._clock, self._profile = other, batches, clock, profile
        self._left, self._rounds = WARM * clock.turn, 0
        self.losses: dict[str, list[float]] = {"ours": [], "bare": []}

    def report(self, metrics: Mapping[str, float], checkpoint: str | None = None) -> None:
        if "loss" not in metrics:
            return
        self.losses["ours"].append(metrics["loss"])
        self._left -= 1
        if self._left:
            return
        if self._profile is not None:
            self._profile.disable()
        if self._rounds:
            self._clock.stop("ours")
        self._take(self._clock.turn if self._rounds else WARM * self._clock.turn, timed=self._rounds > 0)
        self._rounds, self._left = self._rounds + 1, self._clock.turn
        if self._profile is not None:
            self._profile.enable()
        self._clock.start()

    def _take(self, steps: int, timed: bool) -> None:
        self._clock.start()
        for _ in range(steps):
            self.losses["bare"].append(float(self._other.step(*next(self._batches))))
        if timed:
            self._clock.stop("bare")

    def should_stop(self) -> str | None:
        return "the bench is over" if self._rounds > self._clock.rounds else None


def one_rank(rank: int, work: str, rounds: int, profiled: bool, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from bench.peers.bare import Bare
    from bench.peers.work import WORKS, Place
    from fsdp import config
    from fsdp.dist.env import DistEnv
    from fsdp.run.loop import train

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=300))
    place, clock = Place(WORKS[work], rank, RANKS), Clock(TURN[work], rounds)
    profile = cProfile.Profile() if profiled and rank == 0 else None
    turns = Turns(Bare(place.given()), place.batches(), clock, profile)
    env = DistEnv(
        rank=rank,
        world_size=RANKS,
        local_rank=rank,
        local_world_size=RANKS,
        node_rank=0,
        num_nodes=1,
        device=torch.device("cpu"),
        launcher="a bench",
    )
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  lines of the run are not the bench's
    train(
        config.load([*WORKS[work].all_flags, *SAME_UNITS, "--run.dir", str(Path(folder, "run"))]), env, turns
    )
    sys.stdout = sys.__stdout__
    if profile is not None:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        pstats.Stats(profile).sort_stats("tottime").print_stats("/(fsdp|launch)/(?!.*_fully_shard)", 40)
    found = {"wall_s": clock.wall_s, "cpu_s": clock.cpu_s, "losses": turns.losses}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(work: str, rounds: int, profiled: bool = False) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        ranks = [
            context.Process(target=one_rank, args=(rank, work, rounds, profiled, folder))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"{work}: ranks ended with {[process.exitcode for process in ranks]}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]


def check_same(found: Sequence[Mapping[str, Any]]) -> None:
    """Both must have trained the same, or the figures mean nothing. The bare loop's loss is per rank and
    averaged here.
    """
    ours = found[0]["losses"]["ours"][:3]
    bare = [statistics.fmean(rank["losses"]["bare"][step] for rank in found) for step in range(3)]
    for step, (a, b) in enumerate(zip(ours, bare, strict=True), start=1):
        if abs(a - b) > 2e-4 * abs(b):
            raise SystemExit(f"step {step}: our loss is {a}, the bare loop's {b}: not the same work")


def figures(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rank 0's rounds: ranks wait for each other at every step, so one clock is enough. Processor time is of
    all ranks.
    """
    wall = found[0]["wall_s"]
    cpu = {
        whose: [
            statistics.fmean(rank["cpu_s"][whose][nth] for rank in found) for nth in range(len(wall[whose]))
        ]
        for whose in ("ours", "bare")
    }
    return {
        "step_ms": {whose: 1e3 * statistics.median(wall[whose]) for whose in ("ours", "bare")},
        "extra_wall_us": tables.difference([1e6 * s for s in wall["ours"]], [1e6 * s for s in wall["bare"]]),
        "extra_cpu_us": tables.difference([1e6 * s for s in cpu["ours"]], [1e6 * s for s in cpu["bare"]]),
        "throughput": tables.ratio(wall["bare"], wall["ours"]),
        "rounds": len(wall["ours"]),
    }


def row(work: str, one: Mapping[str, Any]) -> list[str]:
    from bench.peers.work import WORKS

    extra, ratio = one["extra_wall_us"], one["throughput"]
    if work == "tiny":
        within = extra.value <= HOST_BAR_US
        bar = f"at most {HOST_BAR_US:.0f} µs: {'yes' if within else 'no'}"
    else:
        bar = f"at least {THROUGHPUT_BAR}: {'yes' if ratio.value >= THROUGHPUT_BAR else 'no'}"
    cpu = one["extra_cpu_us"]
    return [
        WORKS[work].what,
        str(one["rounds"]),
        f"{one['step_ms']['bare']:.2f}",
        f"{one['step_ms']['ours']:.2f}",
        f"{extra.value:.0f} [{extra.low:.0f}, {extra.high:.0f}]",
        f"{cpu.value:.0f} [{cpu.low:.0f}, {cpu.high:.0f}]",
        str(ratio),
        bar,
    ]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=0, help="of the tiny model; the large one takes a fifth"
    )
    parser.add_argument("--work", choices=list(TURN), help="one model alone; nothing is written")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print what rank 0's loop spends its time on")
    options = parser.parse_args(argv)
    about, numbers, rows = tables.machine(), {}, []
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for work in [options.work] if options.work else list(TURN):
        rounds = SHORT[work] if options.short else ROUNDS[work]
        if options.rounds:
            rounds = options.rounds if work == "tiny" else max(2, options.rounds // 5)
        found = measure(work, rounds, options.profile)
        check_same(found)
        numbers[work] = figures(found)
        rows.append(row(work, numbers[work]))
        print("  ".join(rows[-1]), flush=True)
    heads = [
        "",
        "rounds",
        "hand-written, ms a step",
        "ours",
        "difference, µs",
        "processor µs a rank",
        "throughput ratio",
        "bar",
    ]
    text = tables.table(heads, rows)
    if not (options.profile or options.work):
        tables.write(
            "overhead",
            title="What the step loop costs",
            command="python -m bench.overhead",
            short=options.short,
            about=f"{about}. {RANKS} ranks, gloo, one thread each; "
            "medians over rounds, with the 95% interval of the median.",
            text=text,
            numbers=numbers,
        )
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
