"""Kill runs at random moments, resume them, and check that no state is lost or mixed:

    python -m tests.torture --kills 20            as every CI run does
    python -m tests.torture --kills 300 --seed 7  the same moments for one seed, as far as timing allows

A run is killed and restarted until it reaches its end; then its losses and its model must equal those of an
uninterrupted run, bit for bit. After each kill every sealed checkpoint is read whole and compared with the
uninterrupted run's at its step.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.torture.chain import EVERY, STEPS, Chain, Death, Reference, Shape, Violation

SHAPES = (Shape("fsdp", 2), Shape("ddp", 2), Shape("hsdp", 4), Shape("fsdp", 3))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 30))
    parser.add_argument(
        "--place", default="", help="folder for the runs; empty makes one, and removes it if all is well"
    )
    options = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    place = Path(tempfile.mkdtemp(prefix="torture-", dir=options.place or None))
    print(
        f"seed {options.seed}: {options.kills} kills of runs of {STEPS} steps, "
        f"a save every {EVERY}, in {place}",
        flush=True,
    )
    try:
        deaths, ends, seconds = torture(options.kills, random.Random(options.seed), place)
    except Violation as violation:
        print(f"VIOLATION after seed {options.seed}: {violation}", file=sys.stderr)
        return 1
    shutil.rmtree(place)
    print(summary(deaths, ends, seconds))
    return 0


def torture(kills: int, dice: random.Random, place: Path) -> tuple[list[Death], int, float]:
    """The kills, the number of runs that ended, and seconds; Violation at the first violated guarantee."""
    deaths: list[Death] = []
    ends, nth, began = 0, 0, time.monotonic()
    references: dict[Shape, Reference] = {}
    while len(deaths) < kills:
        shape = SHAPES[nth % len(SHAPES)]
        nth += 1
        if shape not in references:
            uninterrupted = Chain(shape, place / f"reference-{shape.strategy}-{shape.ranks}", keep=0)
            uninterrupted.live()
            references[shape] = uninterrupted.read()
        chain = Chain(shape, place / f"{nth}-{shape.strategy}-{shape.ranks}")
        deaths += one_life(chain, references[shape], dice, kills - len(deaths))
        ends += 1
        print(f"{len(deaths)} kills, {ends} ends, {time.monotonic() - began:.0f} s", flush=True)
    return deaths, ends, time.monotonic() - began


def one_life(chain: Chain, reference: Reference, dice: random.Random, most: int) -> list[Death]:
    """One run, killed until it reaches its end, at most `most` times."""
    deaths: list[Death] = []
    done = False
    while not done and len(deaths) < most:
        death = chain.die(dice)
        done = death is None
        if death is not None:
            chain.check_death(death, reference)
            deaths.append(death)
    if not done:
        chain.live()
    chain.check_end(reference)
    shutil.rmtree(chain.folder)
    return deaths


def summary(deaths: Sequence[Death], ends: int, seconds: float) -> str:
    moments = collections.Counter(death.moment for death in deaths)
    lost = [death.reached - death.sealed for death in deaths]
    whole = sum(death.victim == "all ranks" for death in deaths)
    average = sum(lost) / max(1, len(lost))
    return "\n".join(
        [
            f"{len(deaths)} kills in {seconds:.0f} s ({seconds / max(1, len(deaths)):.2f} s a kill): "
            + ", ".join(f"{count} {moment}" for moment, count in sorted(moments.items())),
            f"{whole} of all ranks at once, the rest of one rank",
            f"steps repeated: at most {max(lost, default=0)}, on average {average:.1f}; "
            f"a save every {EVERY}, started at one step and sealed some steps later",
            f"{ends} runs ended with the losses and the model of the uninterrupted run, bit for bit",
            "every newest checkpoint loads, holds the state of one step, "
            "and is at most one interval older than the save in flight",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
