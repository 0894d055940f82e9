"""Kill runs at random moments, resume them, and check that no state is lost or mixed:

    python -m tests.golden.kills --kills 20            as every CI run does
    python -m tests.golden.kills --kills 300 --seed 7  the same moments for one seed, as far as timing allows

A pinned configuration is killed and restarted until it reaches its end; then its losses and its model must
equal those of an uninterrupted run, bit for bit. After each kill every sealed checkpoint is read whole and
compared with the uninterrupted run's at its step. Some runs continue on other numbers of ranks and under
other strategies: they train in fp64 and are compared within 1e-12. Checkpoints are in the run directory, in
the node's own folder first, or on an S3 server (tests/checkpoint/s3_server.py).

Most starts fork their ranks. What is not installed is left out and named. A violation leaves its folder.
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
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import fsspec

from tests.checkpoint.s3_server import KEYS, MISSING, program, s3_server
from tests.golden.chain import Chain, Reference
from tests.golden.configurations import CONFIGURATIONS, INPUTS, Configuration, write_data
from tests.golden.starts import FORKED_RANKS, LOCAL, RAY, SRUN, TORCHRUN, Launchers, kill, launchers
from tests.support.processes import command_line, eventually, pids_with

STEPS, OBJECT_STEPS = 100, 60
"""A save in an object store takes ten times as long."""
MOST_VIOLATIONS, LIFE = 5, 5
WEIGHTS = {FORKED_RANKS: 188, TORCHRUN: 4, LOCAL: 6, RAY: 1, SRUN: 1}
"""How often each launcher starts a run: a start of torchrun takes ten times a forked one's processor time,
one of Ray thirty times.
"""
KILLED = [configuration for configuration in CONFIGURATIONS if not configuration.hugging_face]
"""Each start of the others imports transformers."""
SESSION = "GOLDEN_KILLS"
"""In the environment of all processes of a session: its folder."""


@dataclass
class Session:
    """What all chains share."""

    kills: int
    late: float
    launchers: Launchers
    bucket: str
    data: Path
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def goes_on(self) -> bool:
        over = time.monotonic() > self.late or len(self.violations) >= MOST_VIOLATIONS
        return not over and self.counts["kills"] < self.kills

    def count(self, *names: str) -> None:
        with self.lock:
            self.counts.update(names)


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    folder = Path(tempfile.mkdtemp(prefix="kills-")).resolve()
    # before the first start: forked ranks inherit it
    os.environ.update({"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": f"{folder}/cache", SESSION: str(folder)})
    os.environ["PYTHONPATH"] = str(INPUTS)
    write_data(folder / "data")
    print(f"seed {options.seed}: {options.kills} kills, in {folder}", flush=True)
    began = time.monotonic()
    names = (TORCHRUN, LOCAL, RAY, SRUN) if options.launchers else (TORCHRUN, LOCAL)
    with bucket() as url, launchers(names) as usable:
        late = began + (options.seconds or float("inf"))
        session = Session(options.kills, late, usable, url, folder / "data")
        with ThreadPoolExecutor(options.jobs) as pool:
            seeds = range(options.seed, options.seed + options.jobs)
            chains = [pool.submit(_chain, session, random.Random(seed), folder / str(seed)) for seed in seeds]
    for chain in chains:
        chain.result()
    left_out = {**usable.left_out, **({} if url else {"S3 server": MISSING})}
    print(f"{session.counts.pop('kills')} kills in {time.monotonic() - began:.0f} s")
    print(", ".join(f"{count} {name}" for name, count in session.counts.most_common()))
    print("left out:", "; ".join(f"{name}: {reason}" for name, reason in left_out.items()) or "nothing")
    print("violations:", len(session.violations), *session.violations, sep="\n  ")
    if session.violations:
        return 1
    _end_monitors(folder)
    shutil.rmtree(folder)
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden.kills",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0, help="at most; 0: no limit")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 30))
    parser.add_argument("--jobs", type=int, default=1, help="chains of kills at once")
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
        os.environ.update(KEYS, AWS_ENDPOINT_URL=url)
        fsspec.filesystem("s3").mkdir("kills")
        yield "s3://kills"


def _end_monitors(folder: Path) -> None:
    """A monitor outlives its ranks by some seconds, and would write into the removed folder."""

    def left() -> list[int]:
        pids = [pid for pid in pids_with(f"{SESSION}={folder}") if pid != os.getpid()]
        return [pid for pid in pids if "resource_tracker" not in command_line(pid)]

    for pid in left():
        kill(pid)
    eventually("the end of all processes", lambda: not left(), 30)


def _chain(session: Session, dice: random.Random, folder: Path) -> None:
    """One run after another, until the kills of all chains are enough."""
    references: dict[Configuration, Reference] = {}
    configurations = dice.sample(KILLED, len(KILLED))
    nth = 0
    while session.goes_on:
        configuration, nth = configurations[nth % len(KILLED)], nth + 1
        try:
            _life(session, configuration, references, dice, folder / f"{nth:05d}")
        except Exception as error:  # of any kind: a checkpoint that cannot be read is a violation, too
            traceback.print_exc()
            session.violations.append(f"{folder.name}, {nth:05d}, {configuration.name}: {error!r}")
        print(f"{folder.name}: run {nth} ({configuration.name}); {session.counts['kills']} kills", flush=True)


def _life(
    session: Session,
    configuration: Configuration,
    references: dict[Configuration, Reference],
    dice: random.Random,
    folder: Path,
) -> None:
    """One run, killed until it reaches its end, at most LIFE times."""
    objects = session.bucket if dice.random() < 0.15 and not configuration.others else ""
    local = dice.random() < 0.25 and not configuration.others
    steps = OBJECT_STEPS if session.bucket else STEPS
    if configuration not in references:
        whole = Chain(
            configuration, folder.with_name(f"{folder.name}-whole"), steps, keep=0, data=session.data
        )
        whole.live()
        references[configuration] = whole.read()
    reference = references[configuration]
    chain = Chain(
        configuration,
        folder,
        steps,
        bucket=objects and f"{objects}/{folder.parent.name}",
        local=local,
        data=session.data,
        launchers=session.launchers,
    )
    # A node of the Slurm has a network of its own, where no object store answers.
    absent = {*session.launchers.left_out, *([SRUN] if objects else [])}
    weights = {name: weight for name, weight in WEIGHTS.items() if name not in absent}
    for _ in range(LIFE):
        death = chain.die(dice, dice.choices(list(weights), list(weights.values()))[0])
        if death is None:
            break
        chain.check_death(death, reference)
        session.count("kills", death.moment, death.launcher, death.victim, configuration.name)
        session.count(*(["in objects"] if objects else []), *(["on the node's disk"] if local else []))
    else:
        chain.live()
    chain.check_end(reference)
    session.count("runs as the uninterrupted one")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
