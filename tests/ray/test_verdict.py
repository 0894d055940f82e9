"""Of several ranks' failures, the one that explains the others is reported."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from fsdp.base.errors import OtherRankFailed, RefusedError, TrainingError
from fsdp.rundir import history
from fsdp.rundir.paths import RunDir
from launch.policy import Kind

pytest.importorskip("ray", reason="ray is not installed (pip install 'ray[train]')")

from launch.ray_trainer import FailurePolicy, RunEnded, first_failure
from launch.ray_worker import rank_failure

pytestmark = pytest.mark.ray


def test_a_rank_s_own_error_is_reported_before_secondary_ones() -> None:
    lost = rank_failure(0, RuntimeError("gloo/transport/tcp/pair.cc: Connection reset by peer"))
    heard = rank_failure(1, OtherRankFailed(2, "no", 5))
    knows = rank_failure(2, TrainingError("step 3: loss nan.", "--optim.lr lower"))
    failure = first_failure({0: lost, 1: heard, 2: knows})
    assert failure.message == "rank 2: step 3: loss nan. HINT: --optim.lr lower"
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


def test_equal_failures_end_the_run_and_deaths_at_new_steps_do_not(tmp_path: Path) -> None:
    def reach(step: int) -> None:
        history.append(RunDir(tmp_path).history, {"event": "start", "from_step": 0})
        history.append(RunDir(tmp_path).metrics, {"step": step})

    failed = {0: rank_failure(0, ValueError("bad sample"))}
    policy = FailurePolicy(tmp_path, tmp_path, limit=5)
    for step in (10, 20, 30):
        reach(step)
        policy.after_exception(None, {1: OSError("The actor died.")})
    reach(40)
    policy.after_exception(None, dict(failed))
    reach(40)
    with pytest.raises(RunEnded, match="ValueError: bad sample"):
        policy.after_exception(None, dict(failed))
    assert (tmp_path / "controller.err").read_text().count("restarting the workers") == 4
    refused = {
        0: pickle.loads(pickle.dumps(rank_failure(0, RefusedError("RUN is being written by process 1.")))),
        1: rank_failure(1, OtherRankFailed(0, "no", 4)),
    }
    with pytest.raises(RunEnded) as given_up:
        policy.after_exception(None, refused)
    assert (given_up.value.failure.code, given_up.value.failure.kind) == (4, Kind.REFUSED)
