"""Each contender does the same work: two steps of its loop give the bare loop's losses, within rounding."""

from __future__ import annotations

import io
import json
import os
import random
import sys

import pytest
import torch

from bench import launched
from bench.peers.base import cross_entropy
from bench.peers.roster import ROSTER, absent, settings
from bench.peers.team import Team, TeamError
from bench.peers.worker import Orders
from tests.support.marks import sample_are

STEPS = 2


@pytest.fixture(scope="module")
def bare() -> list[float]:
    return losses("bare")


def losses(name: str) -> list[float]:
    with Team(name, "tiny", 2) as team:
        turn = team.steps(STEPS)
    assert turn["wall_s"] > 0
    found: list[float] = turn["losses"]
    return found


@pytest.mark.parametrize(
    "name", sample_are([], [name for name in ROSTER if name not in ("bare", "torchtitan")])
)
def test_a_contender_has_the_losses_of_the_bare_loop(name: str, bare: list[float]) -> None:
    if ROSTER[name].missing:
        pytest.skip(f"{name}: {ROSTER[name].missing}")
    assert losses(name) == pytest.approx(bare, rel=2e-5)


def test_a_contender_that_is_killed_is_named() -> None:
    with Team("bare", "tiny", 2) as team:
        killed = team._members[1].process
        killed.kill()
        killed.wait()
        with pytest.raises(TeamError, match=r"^bare, rank 1: killed, as by the kernel for lack of memory"):
            team.steps(STEPS)


def test_on_a_device_a_turn_begins_with_steps_that_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They allocate again what the contender has given back for the turns of the others."""
    read, write = os.pipe()
    monkeypatch.setenv("BENCH_ANSWERS", str(write))
    monkeypatch.setattr("sys.stdin", io.StringIO('{"do": "steps", "steps": 2, "untimed": 10}\n'))
    done: list[str] = []
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda name=name: done.append(name))
    orders = Orders(on_device=True)
    assert orders.wait()
    assert [orders.after_step(loss) for loss in (*[3.0] * 10, 2.0, 1.0)] == [True] * 11 + [False]
    with os.fdopen(read) as answers:
        assert json.loads(answers.readline())["losses"] == [2.0, 1.0]
    assert done == ["synchronize", "empty_cache"]


def test_a_loss_of_bf16_logits_is_fp32() -> None:
    logits = torch.randn(8, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = cross_entropy(logits, torch.arange(8))
    assert found.dtype == torch.float32
    assert found == torch.nn.functional.cross_entropy(logits.float(), torch.arange(8))


def test_one_that_cannot_run_is_listed_with_the_reason() -> None:
    assert [line for line in absent(["torchtitan"]) if line.startswith("torchtitan: not run, ")]


def test_settings_of_each_are_listed() -> None:
    said = settings(["bare", "ours", "ours-ddp"])
    assert said[0].startswith("bare fully_shard loop: fully_shard on each block")
    assert said[2].endswith("defaults, --mesh.strategy ddp")


def test_a_launched_command_records_when_steps_end(tmp_path: object) -> None:
    from pathlib import Path

    run = launched.Launched(
        [sys.executable, "-c", "print('step  1/2 x'); print('step  2/2 x')"], Path(str(tmp_path), "log")
    )
    run.wait_for(2, 20)
    run.end()
    assert [step for _, step in run.steps] == [1, 2]


@pytest.mark.slow
def test_a_rank_is_killed_and_no_other(tmp_path: object) -> None:
    from pathlib import Path

    two = "import subprocess, sys; [p.wait() for p in [subprocess.Popen(['sleep', '60']) for _ in 'ab']]"
    run = launched.Launched(
        [sys.executable, "-c", f"print('step 1/9', flush=True); {two}"], Path(str(tmp_path), "log")
    )
    try:
        run.wait_for(1, 20)
        while len(run.ranks()) < 2:
            assert run.now() < 20
        before = run.ranks()
        run.kill_one(random.Random(0))
        assert set(run.ranks()) <= set(before)
    finally:
        run.end()
    assert not run.ranks()
