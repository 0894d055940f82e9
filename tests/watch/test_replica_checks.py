"""Replicas that differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp import config as configuration
from fsdp.base.errors import ConfigError
from fsdp.distributed.env import DistEnv
from fsdp.run.training_loop import TrainingLoop
from fsdp.watch.replica_checks import odd_ones
from tests.support.runs import failures, flags, on_a_rank, run
from tests.support.world import run_world


def test_ranks_outside_the_majority_are_odd_and_both_of_two() -> None:
    assert odd_ones([7, 7, 8], [0, 2, 4]) == [4]
    assert odd_ones([7, 8], [1, 3]) == [1, 3]


def diverging(env: DistEnv, words: list[str]) -> str | None:
    """A bit of one rank's weights is flipped behind step 3."""
    compare_at = TrainingLoop.train_step

    def stepped(self: TrainingLoop, *args: object) -> object:
        if env.rank == 1 and self.state.step == 3:
            with torch.no_grad():
                parameter = next(self.sharded.root.parameters())
                (parameter.to_local() if hasattr(parameter, "to_local") else parameter).view(-1)[0] += 1e-3
        return compare_at(self, *args)  # type: ignore[arg-type]

    TrainingLoop.train_step = stepped  # type: ignore[method-assign, assignment]
    try:
        return on_a_rank(env, words)
    finally:
        TrainingLoop.train_step = compare_at  # type: ignore[method-assign]


@pytest.mark.parametrize("strategy", ["ddp", "hsdp --mesh.replicate 2 --mesh.shard 1"])
def test_replicas_that_differ_stop_the_run_within_n_steps(tmp_path: Path, strategy: str) -> None:
    words = ["--run.dir", str(tmp_path), *flags(f"--watch.divergence 2 --mesh.strategy {strategy}")]
    said = run_world(2, diverging, words)
    assert all(
        one is not None and "step 4: replicas differ in" in one and "ranks 0, 1" in one for one in said
    )


def test_equal_replicas_pass(tmp_path: Path) -> None:
    finished = run(2, tmp_path, "--watch.divergence 2 --train.steps 4 --mesh.strategy ddp")
    assert [record["step"] for record in finished.records if "loss" in record] == [1, 2, 3, 4]


def test_divergence_without_replicas_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--watch.divergence 2 .* fsdp has only one .*HINT: --watch"):
        configuration.load(["--watch.divergence", "2", "--mesh.strategy", "fsdp"])
    alone = failures(1, tmp_path, "--watch.divergence 2 --mesh.strategy ddp")
    assert alone[0] is not None
    assert "--watch.divergence 2: there is one replica" in alone[0]
