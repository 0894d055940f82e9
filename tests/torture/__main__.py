"""Kill runs at random moments, resume them, and check that no state is lost or mixed:

    python -m tests.torture --kills 20            as every CI run does
    python -m tests.torture --kills 300 --seed 7  the same moments for one seed, as far as timing allows
    python -m tests.torture --kills 3000 --jobs 6 six at once, with the seeds SEED to SEED + 5

A run is killed and restarted until it reaches its end; then its losses and its model must equal those of an
uninterrupted run, bit for bit. After each kill every sealed checkpoint is read whole and compared with the
uninterrupted run's at its step.

Most starts fork their ranks; about one in seven is under torchrun or launch.local, whatever the start before
was under. With an S3 server (tests/checkpoint/s3_server.py) some runs have their checkpoints there, and some
have theirs on the node's own disk first.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import fsspec

from tests.checkpoint.s3_server import KEYS, program, s3_server
from tests.torture.chain import EVERY, STEPS, Chain, Death, Reference, Shape, Violation

SHAPES = (
    Shape("fsdp", 2),
    Shape("ddp", 2),
    Shape("hsdp", 4),
    Shape("fsdp", 3),
    Shape("hsdp", 4, local=True),
    Shape("fsdp", 2, steps=60, objects=True),  # a save takes ten times as long
)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 30))
    parser.add_argument(
        "--place", default="", help="folder for the runs; empty makes one, and removes it if all is well"
    )
    parser.add_argument("--jobs", type=int, default=1, help="chains of kills at once, a process each")
    options = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    place = Path(tempfile.mkdtemp(prefix="torture-", dir=options.place or None))
    print(
        f"seed {options.seed}: {options.kills} kills of runs of {STEPS} steps (60 with an object store), "
        f"a save every {EVERY}, in {place}",
        flush=True,
    )
    began = time.monotonic()
    seeds = range(options.seed, options.seed + options.jobs)
    kills = options.kills // options.jobs
    with bucket() as url, ThreadPoolExecutor(options.jobs) as pool:
        sittings = [
            pool.submit(torture, kills, random.Random(seed), place / str(seed), url) for seed in seeds
        ]
        failed = 0
        for seed, sitting in zip(seeds, sittings, strict=True):
            if isinstance(error := sitting.exception(), Violation):
                failed = 1
                print(f"VIOLATION after seed {seed}: {error}", file=sys.stderr, flush=True)
            elif error is not None:
                raise error
    if failed:
        return failed
    shutil.rmtree(place)
    deaths = [death for sitting in sittings for death in sitting.result()[0]]
    print(summary(deaths, sum(sitting.result()[1] for sitting in sittings), time.monotonic() - began))
    return 0


@contextlib.contextmanager
def bucket() -> Iterator[str]:
    """The URL of a bucket of an S3 server; empty where none is installed."""
    if program() is None:
        yield ""
        return
    with s3_server() as url:
        os.environ.update(KEYS, AWS_ENDPOINT_URL=url)  # before the first start: forked ranks inherit it
        fsspec.filesystem("s3").mkdir("torture")
        yield "s3://torture"


def torture(kills: int, dice: random.Random, place: Path, url: str = "") -> tuple[list[Death], int]:
    """The kills and the number of runs that ended; Violation at the first violated guarantee."""
    deaths: list[Death] = []
    ends, began = 0, time.monotonic()
    references: dict[Shape, Reference] = {}
    shapes = [shape for shape in SHAPES if url or not shape.objects]
    nth = dice.randrange(len(shapes))
    while len(deaths) < kills:
        shape = shapes[nth % len(shapes)]
        nth += 1
        plain = replace(shape, objects=False, local=False)
        if plain not in references:
            uninterrupted = Chain(plain, place / f"reference-{plain.name}", keep=0)
            uninterrupted.live()
            references[plain] = uninterrupted.read()
        chain = Chain(shape, place / f"{nth}-{shape.name}", bucket=f"{url}/{place.name}")
        deaths += one_life(chain, references[plain], dice, kills - len(deaths))
        ends += 1
        print(f"{place.name}: {len(deaths)} kills, {ends} ends, {time.monotonic() - began:.0f} s", flush=True)
    return deaths, ends


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
    launchers = collections.Counter(death.launcher for death in deaths)
    lost = [death.reached - death.sealed for death in deaths]
    whole = sum(death.victim == "all ranks" for death in deaths)
    average = sum(lost) / max(1, len(lost))
    return "\n".join(
        [
            f"{len(deaths)} kills in {seconds:.0f} s ({seconds / max(1, len(deaths)):.2f} s a kill): "
            + ", ".join(f"{count} {moment}" for moment, count in sorted(moments.items())),
            f"{whole} of all ranks at once, the rest of one rank or the launcher; "
            + ", ".join(f"{count} {launcher}" for launcher, count in sorted(launchers.items())),
            f"steps repeated: at most {max(lost, default=0)}, on average {average:.1f}; "
            f"a save every {EVERY}, started at one step and sealed some steps later",
            f"{ends} runs ended with the losses and the model of the uninterrupted run, bit for bit",
            "every newest checkpoint loads, holds the state of one step, "
            "and is at most one interval older than the save in flight",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
