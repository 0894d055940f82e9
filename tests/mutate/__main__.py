"""Change the product in one place at a time, and see whether a test fails:

    python -m tests.mutate --room checkpoint --sample 20            tests/checkpoint, 20 mutations
    python -m tests.mutate --file fsdp/optim/loss_scale.py          each mutation of one file
    python -m tests.mutate --known                                  those that once survived
    python -m tests.mutate --known --part 2/30                      three of them, as each CI run does
    python -m tests.mutate --room checkpoint rundir --file launch/policy.py --sample 90 --seed 1 --part 2/9

A mutation that no test finds is printed with its line: a test is missing, or the line makes no difference.
--tests selects other tests than those of the room; a file's own test file comes first. The same --seed
selects the same sample of the same sources, equally many of each room and file; --part takes a piece of it.
The exit code is 1 if a mutation survived.
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

from tests.mutate.known import KNOWN
from tests.mutate.operators import Mutation, mutations
from tests.mutate.trial import ROOT, Copy, Trial, sources

T = TypeVar("T")
QUICK = ("-m", "not slow and not slurm and not ray")


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    wanted = _known(options) if options.known else _sample(options)
    if options.list:
        print("\n".join(str(mutation) for mutation, _ in wanted))
        return 0
    if options.part[0] == 1 and not options.known:
        files = {test for _, tests in wanted for test in tests if test not in QUICK}
        _check_unchanged([*sorted(files), *([] if options.tests else QUICK)])
    trials = run(wanted, options.jobs, options.limit)
    survivors = [trial for trial in trials if not trial.killed_by]
    print(f"{len(trials)} mutations, {len(trials) - len(survivors)} killed, {len(survivors)} survived")
    for trial in survivors:
        print(f"SURVIVED {trial.mutation}")
    return 1 if survivors else 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--room", nargs="+", default=[], help="folders of fsdp/, such as checkpoint")
    parser.add_argument("--file", nargs="+", default=[], help="files, such as launch/policy.py")
    parser.add_argument("--known", action="store_true", help="the mutations of tests/mutate/known.py")
    parser.add_argument("--only", default="", help="of --known, those whose name contains this")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="0 takes all")
    parser.add_argument(
        "--part", type=_part, default=(1, 1), metavar="K/N", help="of N pieces of the sample, the K-th"
    )
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 30))
    parser.add_argument("--tests", nargs="+", default=[], help="default: tests/ROOM without slow ones")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="of one trial")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time, each in its own copy")
    parser.add_argument("--list", action="store_true", help="print the mutations, run nothing")
    options = parser.parse_args(argv)
    if bool(options.room or options.file) == options.known:
        parser.error("give --room and --file, or --known")
    return options


def _part(text: str) -> tuple[int, int]:
    nth, _, count = text.partition("/")
    if not 1 <= int(nth) <= int(count):
        raise ValueError(text)
    return int(nth), int(count)


def _sample(options: argparse.Namespace) -> list[tuple[Mutation, Sequence[str]]]:
    places = [*(f"fsdp/{room}" for room in options.room), *options.file]
    found = [_mutations_of(place) for place in places]
    chosen, dice = [one for some in found for one in some], random.Random(options.seed)
    if options.sample:
        print(f"seed {options.seed}: {options.sample} of {len(chosen)} mutations", flush=True)
        shares = [
            options.sample // len(found) + (at < options.sample % len(found)) for at in range(len(found))
        ]
        chosen = [
            one
            for some, share in zip(found, shares, strict=True)
            for one in dice.sample(some, min(share, len(some)))
        ]
    part = _piece(chosen, *options.part)
    return [(one, options.tests or [*_tests_of(one.file), *QUICK]) for one in part]


def _piece(whole: list[T], nth: int, count: int) -> list[T]:
    return whole[(nth - 1) * len(whole) // count : nth * len(whole) // count]


def _mutations_of(place: str) -> list[Mutation]:
    files = [name for name in sources(place) if name.endswith(".py")]
    if not files:
        raise SystemExit(f"{place} has no Python file. HINT: --room checkpoint, or --file launch/policy.py")
    return [one for name in files for one in mutations(name, (ROOT / name).read_text(encoding="utf-8"))]


def _tests_of(file: str) -> list[str]:
    """The test files of its room, its own first."""
    place = file.split("/")
    room = f"tests/{place[1]}" if place[0] == "fsdp" else f"tests/{place[0]}"
    tests = [name for name in sources(room) if name.rpartition("/")[2].startswith("test_")]
    own = f"test_{place[-1]}"
    return sorted(tests, key=lambda name: (not name.endswith("/" + own), name))


def _known(options: argparse.Namespace) -> list[tuple[Mutation, Sequence[str]]]:
    wanted = [one for one in KNOWN if options.only in one.name]
    if not wanted:
        raise SystemExit(f"no known mutation's name contains {options.only!r}. HINT: --known --list")
    found = [(one.mutation(ROOT), options.tests or one.tests) for one in wanted]
    return _piece(found, *options.part)


def _check_unchanged(tests: Sequence[str]) -> None:
    """A trial is only evidence if the tests pass on the sources as they are."""
    began = time.monotonic()
    with Copy() as copy:
        failed = copy.first_failure(tests, 3600)
    if failed:
        raise SystemExit(f"{failed} fails without a mutation.")
    print(f"without a mutation all tests pass, in {time.monotonic() - began:.0f} s", flush=True)


def run(wanted: Iterable[tuple[Mutation, Sequence[str]]], jobs: int, limit_s: float) -> list[Trial]:
    free: SimpleQueue[Copy] = SimpleQueue()
    copies = [Copy() for _ in range(jobs)]
    for copy in copies:
        free.put(copy)

    def one(mutation: Mutation, tests: Sequence[str]) -> Trial:
        copy = free.get()
        try:
            trial = copy.try_out(mutation, tests, limit_s)
        finally:
            free.put(copy)
        print(trial, flush=True)
        return trial

    try:
        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(one, mutation, tests) for mutation, tests in wanted]
            return [future.result() for future in futures]
    finally:
        for copy in copies:
            copy.__exit__()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
