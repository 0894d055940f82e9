"""Training progress while ranks are killed at random: new steps in a given time, on 4 ranks.

    python -m bench.goodput
                              six rounds of 30 s of faults for each contender that can resume, one kill in
                              15 s on average
    python -m bench.goodput --rounds 2 --add
                              more rounds for those in bench/results

In each round, every contender runs twice: undisturbed, which gives its normal rate, and with kills. The order
rotates. All contenders get the same kills: the times are drawn from the seed and the round, the rank at each
kill. Useful over all: new steps over all steps computed. Goodput: new steps over those that the undisturbed
run of the same round would have made in the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import tables
from bench.launched import Ended, Launched, that_run, with_restarts
from bench.restart import LABELS, command

WARM = 5
"""Steps before which nothing is counted."""
SHORT = ("local", "bare")


@dataclass(frozen=True)
class Ran:
    """One round of one contender."""

    kills: int
    new: int
    done: int
    seconds: float
    quiet_per_s: float
    """Steps a second of the undisturbed run."""


def moments(seconds: float, mean_s: float, seed: int) -> list[float]:
    """The times of the kills, drawn from a Poisson process."""
    draw, at, found = random.Random(seed), 0.0, []
    while (at := at + draw.expovariate(1 / mean_s)) < seconds:
        found.append(at)
    return found


def one_round(name: str, options: argparse.Namespace, nth: int) -> Ran:
    return storm(name, options, nth, quiet(name, options))


def quiet(name: str, options: argparse.Namespace) -> float:
    """Steps a second without kills, over half of the time that the faults take."""
    with started(name, options) as run:
        run.wait_for(WARM, 120)
        time.sleep(options.seconds / 2)
        return rate(run.steps)


def rate(steps: Sequence[tuple[float, int]]) -> float:
    """Steps a second after the first ones."""
    counted = [(when, step) for when, step in steps if step >= WARM]
    if len(counted) < 2:
        raise Ended(f"undisturbed, no step came after step {WARM}")
    (first, begin), (last, end) = counted[0], counted[-1]
    return (end - begin) / (last - first)


def storm(name: str, options: argparse.Namespace, nth: int, quiet_per_s: float) -> Ran:
    with started(name, options) as run:
        run.wait_for(WARM, 120)
        begin, before, said = run.now(), run.newest, len(run.steps)
        killed, seed = 0, options.seed + nth
        draw = random.Random(seed)
        for when in moments(options.seconds, options.mean, seed):
            time.sleep(max(0.0, begin + when - run.now()))
            # during a restart there may be no rank to kill
            if run.ranks():
                run.kill_one(draw)
                killed += 1
        time.sleep(max(0.0, begin + options.seconds - run.now()))
        return Ran(killed, run.newest - before, len(run.steps) - said, options.seconds, quiet_per_s)


@contextlib.contextmanager
def started(name: str, options: argparse.Namespace) -> Iterator[Launched]:
    with tempfile.TemporaryDirectory(prefix="bench-goodput-") as place:
        words = command(name, Path(place, "run"), options.ranks, options.every, 1000)
        run = Launched(words, Path(place, "log"), with_restarts())
        try:
            yield run
        finally:
            run.end()


def shown(seen: Mapping[str, Sequence[Ran]]) -> str:
    rows = []
    for name, rounds in seen.items():
        new, done = (sum(getattr(ran, what) for ran in rounds) for what in ("new", "done"))
        goodput = tables.ratio([ran.new / ran.seconds for ran in rounds], [ran.quiet_per_s for ran in rounds])
        rows.append(
            [
                LABELS[name],
                sum(ran.kills for ran in rounds),
                f"{new} of {done}",
                f"{new / max(1, done):.2f}",
                tables.spread([ran.quiet_per_s for ran in rounds]),
                tables.spread([ran.new / ran.seconds for ran in rounds]),
                goodput.text(".2f") + (f" ({tables.TOO_FEW})" if goodput.low is None else ""),
            ]
        )
    columns = [
        "",
        "kills",
        "steps that were new",
        "useful over all",
        "steps/s undisturbed",
        "new steps/s under faults",
        "goodput [95%]",
    ]
    return tables.table(columns, rows)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=0, help="0 is 6, or 1 with --short")
    parser.add_argument(
        "--seconds", type=float, default=0, help="of faults in a round; 0 is 30, or 12 with --short"
    )
    parser.add_argument(
        "--mean", type=float, default=0, help="seconds from kill to kill, on average; 0 is 15, or 6"
    )
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=9)
    parser.add_argument("--only", default="", help="these contenders: local,ours,bare")
    parser.add_argument("--add", action="store_true", help="to the rounds that were taken before")
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args(argv)
    options.mean = options.mean or (6.0 if options.short else 15.0)
    options.seconds = options.seconds or (12.0 if options.short else 30.0)
    wanted = tables.chosen(
        parser, options.only, list(LABELS), SHORT if options.short else list(LABELS), needs=()
    )
    flags = (
        f"--ranks {options.ranks} --seconds {options.seconds:.0f} --mean {options.mean:.0f} --every "
        f"{options.every} "
        f"--seed {options.seed}"
    )
    names = that_run(wanted)
    before = tables.standing("goodput", short=options.short) if options.add else {}
    if before and (before["flags"] != flags or "rounds" not in before):
        parser.error(f"--add: what stands was run with {before['flags']}. HINT: the same flags, or no --add")
    tables.check_add(parser, before.get("rounds"), names)
    machine = tables.joined(before.get("machine", ""), tables.machine())
    seen = {name: [Ran(**one) for one in before["rounds"][name]] if before else [] for name in names}
    done, left_out = len(next(iter(seen.values()))), dict[str, str]()
    for nth in range(done, done + (options.rounds or (1 if options.short else 6))):
        for name in tables.turned(list(seen), nth):
            try:
                seen[name].append(one_round(name, options, nth))
                print(f"round {nth + 1}, {name}: {seen[name][-1]}", flush=True)
            except Ended as ended:
                del seen[name]
                left_out[name] = f"round {nth + 1}: {ended}"
    rounds = len(next(iter(seen.values()), []))
    missing = [f"- {LABELS[name]}: left out, {why}" for name, why in left_out.items()]
    print(
        tables.write(
            "goodput",
            title="Goodput under random kills",
            short=options.short,
            command=f"python -m bench.goodput {flags} --rounds {rounds}",
            about=f"{machine}; {options.ranks} ranks, {rounds} rounds of {options.seconds:.0f} s of faults "
            f"and half of it undisturbed, a kill each {options.mean:.0f} s on average (seed {options.seed}), "
            f"a checkpoint each {options.every} steps",
            text="\n\n".join([shown(seen), *missing]),
            numbers={"machine": machine, "flags": flags, "rounds": seen},
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
