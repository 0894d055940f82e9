"""A load restores the saved bits at any number of ranks, and training continues as without a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp.distributed.env import DistEnv
from tests.checkpoint.small import Kind, bits, build, save_once
from tests.support.marks import quick_are, sample_are
from tests.support.runs import failures, run
from tests.support.world import run_world

LATER = 5


def uninterrupted(
    env: DistEnv, kind: Kind, run_dir: str, steps: int, how: dict[str, Any]
) -> tuple[list[float], dict[str, int]]:
    """Trains; a save starts after step 3 and is written during the next steps."""
    run = build(env, kind, run_dir, **how)
    losses = []
    for _ in range(steps):
        losses.append(run.step())
        if run.state.step == 3:
            run.save()
    run.checkpointer.close()
    return losses, bits(run.state)


def resumed(
    env: DistEnv, kind: Kind, run_dir: str, steps: int, how: dict[str, Any]
) -> tuple[list[float], dict[str, int]]:
    run = build(env, kind, run_dir, seed=99, **how)  # other weights: all must come from the checkpoint
    found = run.checkpointer.restore(run.state)
    assert found is not None
    assert found.step == run.state.step == 3
    losses = [run.step() for _ in range(steps - 3)]
    run.checkpointer.close()
    return losses, bits(run.state)


@pytest.mark.parametrize(
    ("kind", "ranks", "how"),
    quick_are(
        [("hsdp", 4, {})],
        [
            ("fsdp", 2, {}),
            ("hsdp", 4, {}),
            ("fsdp", 3, {"optimizer": "fused"}),
            ("fsdp", 2, {"optimizer": "sgd"}),
        ],
        [("fsdp", 3, {"optimizer": "fused"})],
    ),
)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one_bit_for_bit(
    tmp_path: Path, kind: Kind, ranks: int, how: dict[str, Any]
) -> None:
    whole = run_world(ranks, uninterrupted, kind, str(tmp_path), 10, how)
    again = run_world(ranks, resumed, kind, str(tmp_path), 10, how)
    assert [losses for losses, _ in again] == [losses[3:] for losses, _ in whole]
    assert [state for _, state in again] == [state for _, state in whole]


@pytest.mark.long
def test_three_ranks_under_ddp_resume_to_the_bit(tmp_path: Path) -> None:
    """A sum over three is rounded by its place in DDP's buckets, which DDP moves after the first backward."""
    words = (
        "--mesh.strategy ddp --train.steps 6 --data.name synthetic --data.args.kind tokens --data.seq_len 24"
    )
    words += " --model.name transformer --model.args.width 32"
    whole = run(3, tmp_path / "whole", words)
    assert failures(3, tmp_path / "parts", words, "--train.stop_after 2") == [None] * 3
    parts = run(3, tmp_path / "parts", words)
    losses = [
        [(one["step"], one.get("loss"), one.get("grad_norm")) for one in r.records] for r in (whole, parts)
    ]
    assert losses[0] == losses[1]
    assert all(torch.equal(parts.parameters[name], value) for name, value in whole.parameters.items())


SHAPES: list[tuple[Kind, int]] = [("fsdp", 1), ("fsdp", 3), ("fsdp", 4), ("hsdp", 4), ("ddp", 3)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """A checkpoint of each mesh: run directory → the bits saved, equal on every rank."""
    found = {}
    for kind, ranks in SHAPES:
        run_dir = str(tmp_path_factory.mktemp(f"{kind}{ranks}"))
        saved = run_world(ranks, save_once, kind, run_dir)
        assert all(one == saved[0] for one in saved)
        found[run_dir] = saved[0]
    return found


def loaded(env: DistEnv, kind: Kind, run_dirs: list[str]) -> list[tuple[dict[str, int], list[float]]]:
    seen = []
    for run_dir in run_dirs:
        run = build(env, kind, run_dir, seed=99)
        assert run.checkpointer.restore(run.state) is not None
        found = bits(run.state)
        seen.append((found, [run.step() for _ in range(LATER)]))
        run.checkpointer.close()
    return seen


@pytest.mark.parametrize(("kind", "ranks"), sample_are([], SHAPES))
def test_each_mesh_loads_the_checkpoints_of_every_other(
    written: dict[str, dict[str, int]], kind: Kind, ranks: int
) -> None:
    everyones = run_world(ranks, loaded, kind, list(written))
    for seen in everyones:
        assert [found for found, _ in seen] == list(written.values())
        for _, losses in seen:
            assert losses == pytest.approx(everyones[0][0][1], rel=1e-5)
