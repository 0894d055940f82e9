"""Of several ranks' failures, the one that explains the others is reported."""

from __future__ import annotations

import pytest

from fsdp.base.errors import OtherRankFailed, TrainingError
from launch.policy import Kind

pytest.importorskip("ray", reason="ray is not installed (pip install 'ray[train]')")

from launch.ray_trainer import first_failure
from launch.ray_worker import rank_failure

pytestmark = pytest.mark.ray


def test_a_rank_s_own_error_is_reported_before_secondary_ones() -> None:
    lost = rank_failure(0, RuntimeError("gloo/transport/tcp/pair.cc: Connection reset by peer"))
    heard = rank_failure(1, OtherRankFailed(2, "no", 5))
    knows = rank_failure(2, TrainingError("step 3: loss nan.", "a lower --optim.lr"))
    failure = first_failure({0: lost, 1: heard, 2: knows})
    assert failure.message == "rank 2: step 3: loss nan. HINT: a lower --optim.lr"
    assert (failure.code, failure.kind) == (5, Kind.FINAL)


def test_a_death_is_reported_before_secondary_errors_and_restarted() -> None:
    failure = first_failure(
        {
            0: rank_failure(0, RuntimeError("NCCL communicator was aborted")),
            1: OSError("The actor died.\nlong"),
        }
    )
    assert failure.message == "rank 1 died (The actor died.)"
    assert failure.kind is Kind.DIED
