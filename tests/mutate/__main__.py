"""Change the product in one place at a time, and see whether a test fails:

    python -m tests.mutate --room checkpoint --sample 20            tests/checkpoint, 20 mutations
    python -m tests.mutate --file fsdp/optim/loss_scale.py          each mutation of one file
    python -m tests.mutate --known                                  those that once survived, as CI does

A mutation that no test finds is printed with its line: a test is missing, or the line makes no difference.
--tests selects other tests than those of the room. The same --seed selects the same sample of the same
sources. The exit code is 1 if a mutation survived.
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

from tests.mutate.known import KNOWN
from tests.mutate.operators import Mutation, mutations
from tests.mutate.trial import ROOT, Copy, Trial, sources

QUICK = ("-m", "not slow and not slurm and not ray")


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    wanted = _known(options) if options.known else _sample(options)
    if options.list:
        print("\n".join(str(mutation) for mutation, _ in wanted))
        return 0
    if not options.known:
        _check_unchanged(wanted[0][1])
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
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--room", help="a folder of fsdp/, such as checkpoint")
    what.add_argument("--file", help="one file, such as launch/policy.py")
    what.add_argument("--known", action="store_true", help="the mutations of tests/mutate/known.py")
    parser.add_argument("--only", default="", help="of --known, those whose name contains this")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="0 takes all")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 30))
    parser.add_argument("--tests", nargs="+", default=[], help="default: tests/ROOM without slow ones")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="of one trial")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time, each in its own copy")
    parser.add_argument("--list", action="store_true", help="print the mutations, run nothing")
    return parser.parse_args(argv)


def _sample(options: argparse.Namespace) -> list[tuple[Mutation, Sequence[str]]]:
    place = options.file or f"fsdp/{options.room}"
    files = [name for name in sources(place) if name.endswith(".py")]
    if not files:
        raise SystemExit(f"{place} has no Python file. HINT: --room checkpoint, or --file launch/policy.py")
    found = [one for name in files for one in mutations(name, (ROOT / name).read_text(encoding="utf-8"))]
    tests = options.tests or [_tests_of(files[0]), *QUICK]
    if options.sample:
        print(f"seed {options.seed}: {options.sample} of {len(found)} mutations", flush=True)
        found = random.Random(options.seed).sample(found, min(options.sample, len(found)))
    return [(one, tests) for one in found]


def _tests_of(file: str) -> str:
    place = file.split("/")
    return f"tests/{place[1]}" if place[0] == "fsdp" else f"tests/{place[0]}"


def _known(options: argparse.Namespace) -> list[tuple[Mutation, Sequence[str]]]:
    wanted = [one for one in KNOWN if options.only in one.name]
    if not wanted:
        raise SystemExit(f"no known mutation's name contains {options.only!r}. HINT: --known --list")
    return [(one.mutation(ROOT), options.tests or one.tests) for one in wanted]


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
