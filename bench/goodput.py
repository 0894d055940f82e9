"""Training progress while ranks are killed at random: new steps in a given time, on 4 ranks.

    python -m bench.goodput
                              90 s of faults for each contender that can resume, one kill in 15 s on average
    python -m bench.goodput --only local,bare --add
                              these again, beside the others in bench/results

All contenders get the same kills: the times are drawn once from the seed, the rank at each kill. An
undisturbed stretch first measures the contender's normal rate. Useful over all: new steps over all steps
computed. Goodput: new steps over those that the undisturbed rate would have made in the same time.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import tables
from bench.launched import Ended, Launched, that_run, with_restarts
from bench.restart import LABELS, command

QUIET = (5, 25)
"""Steps between which the undisturbed rate is taken."""
SHORT = ("local", "bare")


@dataclass(frozen=True)
class Ran:
    kills: int
    new: int
    done: int
    seconds: float
    quiet_per_s: float

    @property
    def useful(self) -> float:
        return self.new / max(1, self.done)

    @property
    def goodput(self) -> float:
        return self.new / self.seconds / self.quiet_per_s


def moments(seconds: float, mean_s: float, seed: int) -> list[float]:
    """The times of the kills, drawn from a Poisson process."""
    draw, at, found = random.Random(seed), 0.0, []
    while (at := at + draw.expovariate(1 / mean_s)) < seconds:
        found.append(at)
    return found


def storm(name: str, options: argparse.Namespace) -> Ran:
    with tempfile.TemporaryDirectory(prefix="bench-goodput-") as place:
        words = command(name, Path(place, "run"), options.ranks, options.every, 1000)
        run = Launched(words, Path(place, "log"), with_restarts())
        try:
            first, last = (run.wait_for(step, 120) for step in QUIET)
            quiet = (QUIET[1] - QUIET[0]) / (last - first)
            begin, before, said = run.now(), run.newest, len(run.steps)
            killed, draw = 0, random.Random(options.seed)
            for when in moments(options.seconds, options.mean, options.seed):
                time.sleep(max(0.0, begin + when - run.now()))
                # during a restart there may be no rank to kill
                if run.ranks():
                    run.kill_one(draw)
                    killed += 1
            time.sleep(max(0.0, begin + options.seconds - run.now()))
            return Ran(killed, run.newest - before, len(run.steps) - said, options.seconds, quiet)
        finally:
            run.end()


def shown(seen: dict[str, Ran]) -> str:
    rows = [
        [
            LABELS[name],
            ran.kills,
            f"{ran.new} of {ran.done}",
            f"{ran.useful:.2f}",
            f"{ran.quiet_per_s:.1f}",
            f"{ran.new / ran.seconds:.1f}",
            f"{ran.goodput:.2f}",
        ]
        for name, ran in seen.items()
    ]
    columns = [
        "",
        "kills",
        "steps that were new",
        "useful over all",
        "steps/s undisturbed",
        "new steps/s under faults",
        "goodput",
    ]
    return tables.table(columns, rows)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=0, help="of faults, each contender; 0 is 90, or 12 with --short"
    )
    parser.add_argument(
        "--mean", type=float, default=0, help="seconds from kill to kill, on average; 0 is 15, or 6"
    )
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=9)
    parser.add_argument("--only", default="", help="these contenders: local,ours,bare")
    parser.add_argument(
        "--add", action="store_true", help="keep the others that were run before with the same flags"
    )
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args(argv)
    options.mean = options.mean or (6.0 if options.short else 15.0)
    options.seconds = options.seconds or (12.0 if options.short else 90.0)
    wanted = tables.chosen(
        parser, options.only, list(LABELS), SHORT if options.short else list(LABELS), needs=()
    )
    flags = (
        f"--ranks {options.ranks} --seconds {options.seconds:.0f} --mean {options.mean:.0f} --every "
        f"{options.every} "
        f"--seed {options.seed}"
    )
    before = tables.standing("goodput", short=options.short) if options.add else {}
    if before and before["flags"] != flags:
        parser.error(f"--add: what stands was run with {before['flags']}. HINT: the same flags, or no --add")
    machine = tables.joined(before.get("machine", ""), tables.machine())
    seen = {name: Ran(**one) for name, one in before.get("ran", {}).items()}
    left_out: list[str] = []
    for name in that_run(wanted):
        try:
            seen[name] = storm(name, options)
            print(f"{name}: {seen[name]}, goodput {seen[name].goodput:.2f}", flush=True)
        except Ended as ended:
            left_out.append(f"- {LABELS[name]}: left out, {ended}")
    seen = {name: seen[name] for name in LABELS if name in seen}
    print(
        tables.write(
            "goodput",
            title="Goodput under random kills",
            short=options.short,
            command=f"python -m bench.goodput {flags}",
            about=f"{machine}; {options.ranks} ranks, {options.seconds:.0f} s of faults each, a kill each "
            f"{options.mean:.0f} s on average (seed {options.seed}), a checkpoint each {options.every} steps",
            text="\n\n".join([shown(seen), *left_out]),
            numbers={"machine": machine, "flags": flags, "ran": seen},
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
