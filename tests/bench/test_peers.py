"""Each contender does the same work: two steps of its loop give the bare loop's losses, within rounding."""

from __future__ import annotations

import pytest

from bench.peers.roster import ROSTER
from bench.peers.team import Team
from tests.support.marks import sample_are

STEPS = 2


@pytest.fixture(scope="module")
def bare() -> list[float]:
    return losses("bare")


def losses(name: str) -> list[float]:
    with Team(name, "tiny", 1 if ROSTER[name].one_rank else 2) as team:
        turn = team.steps(STEPS)
    assert turn["wall_s"] > 0
    found: list[float] = turn["losses"]
    return found


@pytest.mark.parametrize(
    "name", sample_are([], [name for name in ROSTER if name not in ("bare", "ours-fp8")])
)
def test_a_contender_has_the_losses_of_the_bare_loop(name: str, bare: list[float]) -> None:
    if ROSTER[name].missing:
        pytest.skip(f"{name}: {ROSTER[name].missing}")
    assert losses(name) == pytest.approx(bare, rel=2e-5)
