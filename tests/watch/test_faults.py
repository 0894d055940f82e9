"""Real faults on four real ranks, once each: the command that does all kinds many times is python -m
bench.faults.

SIGSTOP and an exception, with what is printed of them, are in test_knobs.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.fault_kinds import KINDS, Kind
from bench.faults import Case
from tests.support.marks import sample_are

ROOT = Path(__file__).parents[2]
SELDOM = ("SIGSTOP", "exception", "sys.exit", "NaN", "deadlock in Python", "another collective")
"""RankTimes like others, or by others: left to the command."""
SAMPLE = [kind for kind in KINDS if kind.name not in SELDOM]
FEW = [kind for kind in SAMPLE if kind.name in ("SIGKILL", "collective left out")]
"""What make test has: a rank that is gone, and one that the collectives tell."""


def can_be_here(kind: Kind) -> bool:
    return not kind.two_nodes or os.geteuid() == 0


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """One process for all kinds: their ranks are forks of it, and nobody waits for imports."""
    found = tmp_path_factory.mktemp("faults") / "cases.json"
    selected = [
        item
        for item in request.session.items
        if item.path == request.path and not item.get_closest_marker("skip")
    ]
    asked = [item.callspec.params["kind"] for item in selected if isinstance(item, pytest.Function)]
    names = ",".join(kind.name for kind in SAMPLE if kind in asked and can_be_here(kind))
    command = [sys.executable, "-m", "bench.faults", "--times", "1", "--kinds", names, "--steps", "14"]
    words = [*command, "--json", str(found), "--seed", str(os.getpid())]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert found.exists(), done.stdout + done.stderr
    print(done.stdout)
    return {one["kind"]: Case(**one) for one in json.loads(found.read_text())}


@pytest.mark.parametrize("kind", sample_are(FEW, SAMPLE), ids=[kind.name for kind in SAMPLE])
def test_the_rank_and_what_it_has_are_named(cases: dict[str, Case], kind: Kind) -> None:
    if not can_be_here(kind):
        pytest.skip("a network namespace needs root")
    case = cases[kind.name]
    assert case.right(kind), case
    if kind.ends and not kind.two_nodes:
        assert len(case.codes) == 4
        assert 0 not in case.codes
