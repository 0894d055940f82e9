"""Kill runs at random moments, resume them, and check that no state is lost or mixed:

    python -m tests.torture --kills 20            as every CI run does
    python -m tests.torture --kills 300 --seed 7  the same moments for one seed, as far as timing allows
    python -m tests.torture --kills 10000 --seconds 7200 --jobs 2 --record bench/results/torture.json
                              two at once, with the seeds SEED and SEED + 1, for two hours at most; what was
                              checked is added to that file and to the page beside it, also if this is
                              stopped or killed

A run is killed and restarted until it reaches its end; then its losses and its model must equal those of an
uninterrupted run, bit for bit. After each kill every sealed checkpoint is read whole and compared with the
uninterrupted run's at its step. Some runs continue on other numbers of ranks and under other strategies: they
train in fp64 and are compared within 1e-12.

tests/torture/shapes.py lists the runs, tests/torture/starts.py how they are started: most starts fork their
ranks. With an S3 server (tests/checkpoint/s3_server.py) some runs have their checkpoints there. What is not
installed is left out and named.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import fsspec

from bench.processes import pids
from tests.checkpoint.s3_server import KEYS, MISSING, program, s3_server
from tests.support.processes import command_line, eventually, pids_with
from tests.torture import kills_page
from tests.torture.chain import Chain, Death, Reference, Violation
from tests.torture.over import over_at_a_signal
from tests.torture.record import Record
from tests.torture.shapes import SHAPES, Shape, write_data
from tests.torture.starts import Launchers, kill, launchers

MOST_VIOLATIONS = 5
SITTING = "SHARDRUN_TORTURE"
"""In the environment of all processes of a sitting: its folder."""


@dataclass(frozen=True)
class Torture:
    """What all chains of a sitting share."""

    kills: int
    record: Record
    over: threading.Event
    launchers: Launchers
    url: str
    data: Path

    @property
    def goes_on(self) -> bool:
        return not self.over.is_set() and self.record.sitting.get("kills", 0) < self.kills


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    place = Path(tempfile.mkdtemp(prefix="torture-", dir=options.place or None)).resolve()
    os.environ["XDG_CACHE_HOME"] = str(place / "cache")  # of the tokenized text
    os.environ[SITTING] = str(place)
    write_data(place / "data")
    print(f"seed {options.seed}: {options.kills} kills, in {place}", flush=True)
    over = over_at_a_signal(options.seconds)
    with bucket() as url, launchers(options.launchers) as found:
        record = Record(
            Path(options.record) if options.record else None,
            kills_page.page,
            seed=options.seed,
            jobs=options.jobs,
            left_out=[*found.left_out, *([] if url else [f"S3 server: {MISSING}"])],
            kills=0,
            ends=0,
            steps_repeated=0,
            most_repeated=0,
        )
        shared = Torture(options.kills, record, over, found, url, place / "data")
        with ThreadPoolExecutor(options.jobs) as pool:
            seeds = range(options.seed, options.seed + options.jobs)
            chains = [pool.submit(torture, shared, random.Random(one), place / str(one)) for one in seeds]
    for chain in chains:
        chain.result()
    record.write()
    print(kills_page.summary([record.sitting]))
    if record.sitting["violations"]:
        return 1
    end_monitors(place)
    shutil.rmtree(place)
    return 0


def end_monitors(place: Path) -> None:
    """A monitor outlives its ranks by some seconds, and would write into the removed folder."""

    def left() -> list[int]:
        found = [pid for pid in pids_with(f"{SITTING}={place}") if pid != os.getpid()]
        return [pid for pid in found if "resource_tracker" not in command_line(pid)]

    for pid in left():
        kill(pid)
    eventually("the end of all processes", lambda: not left(), 30)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0, help="at most; 0: no limit")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 30))
    parser.add_argument(
        "--place", default="", help="folder for the runs; they are removed where all is well (default: /tmp)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="chains of kills at once")
    parser.add_argument("--record", default="", help="JSON file that this sitting is added to")
    parser.add_argument(
        "--launchers", action=argparse.BooleanOptionalAction, default=True, help="Ray and Slurm too"
    )
    return parser.parse_args(argv)


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


def torture(shared: Torture, dice: random.Random, place: Path) -> None:
    """One run after another, until the kills of all chains are enough. A violation leaves its folder."""
    references: dict[Shape, Reference] = {}
    shapes = [shape for shape in SHAPES if shared.url or not shape.objects]
    nth, ends, began = dice.randrange(len(shapes)), 0, time.monotonic()
    while shared.goes_on:
        shape = shapes[nth % len(shapes)]
        nth += 1
        try:
            one_life(shared, shape, references, dice, place, f"{nth:05d}")
        except Exception as error:  # of any kind: a checkpoint that cannot be read is one, too
            text = str(error) if isinstance(error, Violation) else f"{place}/{nth:05d}: {error!r}"
            print(f"VIOLATION after seed {place.name}: {text}", file=sys.stderr, flush=True)
            if not isinstance(error, Violation):
                traceback.print_exc()
            found = f"{shape.name}: {text.replace(f'{place}/', '')}"  # a record is committed: no path of here
            if shared.record.violation(found) >= MOST_VIOLATIONS:
                shared.over.set()
        ends += 1
        kills, seconds = shared.record.sitting["kills"], time.monotonic() - began
        print(f"{place.name}: run {ends} is over ({shape.name}); {kills} kills, {seconds:.0f} s")
        sys.stdout.flush()


def one_life(
    shared: Torture,
    shape: Shape,
    references: dict[Shape, Reference],
    dice: random.Random,
    place: Path,
    name: str,
) -> None:
    """One run, killed until it reaches its end, or the kills are enough."""
    reference = reference_of(shape, references, place, shared.data)
    chain = Chain(
        shape,
        place / name,
        bucket=f"{shared.url}/{place.name}",
        launchers=shared.launchers,
        data=shared.data,
    )
    while shared.goes_on:
        death = chain.die(dice)
        if death is None:
            break
        chain.check_death(death, reference)
        _count(shared.record, death, shape)
    else:
        if shared.over.is_set():
            return
        chain.live()
    chain.check_end(reference)
    shared.record.add(ends=1)
    _remove(chain)


def _remove(chain: Chain) -> None:
    """A monitor outlives ranks that are killed at their end, and writes into the folder."""

    def monitors() -> list[int]:
        return [pid for pid in pids() if str(chain.run_dir) in command_line(pid)]

    eventually(f"the end of the monitors of {chain.run_dir}", lambda: not monitors(), 30)
    shutil.rmtree(chain.folder)


def reference_of(shape: Shape, known: dict[Shape, Reference], place: Path, data: Path) -> Reference:
    """The uninterrupted run of this shape. Where the checkpoints go makes no difference to it."""
    plain = replace(shape, objects=False, local=False)
    if plain not in known:
        run = Chain(plain, place / f"reference-{len(known)}", keep=0, data=data)
        run.live()
        known[plain] = run.read()
        if not shape.others:
            _remove(run)
    return known[plain]


def _count(record: Record, death: Death, shape: Shape) -> None:
    repeated = death.reached - death.sealed
    record.most(most_repeated=repeated)
    record.count(
        {"kills": 1, "steps_repeated": repeated},
        moments=death.moment,
        launchers=death.launcher,
        victims=death.victim,
        shapes=shape.name,
        stores=shape.store,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
