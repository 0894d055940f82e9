"""Of several ranks' failures one line is told: the one that explains the others."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from fsdp.base.errors import ConfigError, Elsewhere, RefusedError, TrainingError
from fsdp.rundir import line_files
from fsdp.rundir.paths import RunDir
from launch.policy import Kind

pytestmark = pytest.mark.ray


def test_the_rank_that_knows_why_speaks_for_the_others() -> None:
    from launch.ray_failure import tell
    from launch.ray_worker import _last_words

    lost = _last_words(0, RuntimeError("gloo/transport/tcp/pair.cc: Connection reset by peer"))
    heard = _last_words(1, Elsewhere(2, "no", 5))
    knows = _last_words(2, TrainingError("step 3: loss nan.", "--optim.lr lower"))
    story = tell({0: lost, 1: heard, 2: knows})
    assert story.message == "rank 2: step 3: loss nan. HINT: --optim.lr lower"
    assert (story.exit_code, story.kind) == (5, Kind.FINAL)


def test_a_death_is_told_before_what_followed_from_it_and_is_tried_again() -> None:
    from launch.ray_failure import tell
    from launch.ray_worker import _last_words

    story = tell(
        {
            0: _last_words(0, RuntimeError("NCCL communicator was aborted")),
            1: OSError("The actor died.\nlong"),
        }
    )
    assert story.message == "rank 1 died (The actor died.)"
    assert story.kind is Kind.DIED


def test_last_words_cross_a_process_border() -> None:
    from launch.ray_worker import _last_words

    words = _last_words(3, ConfigError("--x 1 is wrong.", "--x 2"))
    assert str(pickle.loads(pickle.dumps(words))) == str(words) == "rank 3: --x 1 is wrong. HINT: --x 2"


def test_two_tries_that_end_alike_end_the_run_and_deaths_at_new_steps_do_not(tmp_path: Path) -> None:
    from launch.ray_failure import GivenUp, Referee
    from launch.ray_worker import _last_words

    def reach(step: int) -> None:
        line_files.append(RunDir(tmp_path).history, {"event": "start", "from_step": 0})
        line_files.append(RunDir(tmp_path).metrics, {"step": step})

    failed = {0: _last_words(0, ValueError("bad sample"))}
    referee = Referee(tmp_path, tmp_path, max_failures=5)
    for step in (10, 20, 30):
        reach(step)
        referee.after_exception(None, {1: OSError("The actor died.")})
    reach(40)
    referee.after_exception(None, dict(failed))
    reach(40)
    with pytest.raises(GivenUp, match="ValueError: bad sample"):
        referee.after_exception(None, dict(failed))
    assert (tmp_path / "controller.err").read_text().count("started again") == 4


def test_a_refusal_is_final(tmp_path: Path) -> None:
    from launch.ray_failure import GivenUp, Referee
    from launch.ray_worker import _last_words

    refused = {
        0: _last_words(0, RefusedError("RUN is being written by process 1.")),
        1: _last_words(1, Elsewhere(0, "no", 4)),
    }
    with pytest.raises(GivenUp) as given_up:
        Referee(tmp_path, tmp_path, max_failures=5).after_exception(None, dict(refused))
    assert given_up.value.args[1:3] == (4, Kind.REFUSED)
