"""Rank 0, which writes every record and seals every save, is killed in each phase: the others end, the
verdict names it, and the next start reaches the end of an unbroken run, bit for bit.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from fsdp.base.phases import PHASES
from fsdp.rundir.history import read_records
from fsdp.watch.records import ENDED
from tests.golden.chain import Chain, Reference, wide
from tests.support.forked import FORKED
from tests.support.marks import sample_are
from tests.support.processes import eventually
from tests.watch import dying

RANKS, STEPS, STEP = 3, 20, 10
"""At step 10 the run evaluates and saves, too."""
ENDS_S = 120.0
MORE = ["--train.eval_every_steps", "5", "--checkpoint.every_steps", "5"]


@functools.cache
def reference(folder: Path) -> Reference:
    whole = Chain(wide("fsdp", RANKS), folder / "whole", STEPS, keep=0)
    whole.flags += MORE
    whole.live()
    return whole.read()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rank_0")


def killed(chain: Chain, phase: str) -> list[int | None]:
    """Exit codes of the ranks; None for one that runs on."""
    words = (RANKS, chain.flags, str(chain.folder / "store"), str(chain.folder / "log"), phase, STEP)
    ranks = [FORKED.Process(target=dying.run, args=(rank, *words), daemon=True) for rank in range(RANKS)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(ENDS_S)
    codes = [one.exitcode for one in ranks]
    for one in ranks:
        one.kill()
        one.join()
    return codes


def verdicts_in(file: Path) -> list[dict[str, Any]]:
    return [one for one in read_records(file) if one["kind"] != ENDED]


@pytest.mark.slow
@pytest.mark.parametrize("phase", sample_are(["end"], PHASES))
def test_the_others_end_and_the_run_resumes_to_the_bit(phase: str, place: Path) -> None:
    chain = Chain(wide("fsdp", RANKS), place / phase, STEPS)
    chain.flags += MORE
    codes = killed(chain, phase)
    assert codes[0] == -9
    assert None not in codes, (chain.folder / "log").read_text()
    verdicts = chain.run_dir / "watch" / "verdicts.jsonl"
    if phase != "start":  # there may be no monitor yet
        # a thread of the monitor writes it, after the ranks have ended if they end at once
        [verdict] = eventually("there is a verdict", lambda: verdicts_in(verdicts), 20)
        assert (verdict["kind"], verdict["ranks"]) == ("died", [0])
        assert f"step {20 if phase == 'end' else STEP}, {phase}" in verdict["what"]
    chain.live()
    chain.check_end(reference(place))
