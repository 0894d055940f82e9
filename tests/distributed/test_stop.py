"""All ranks stop after the same step, whichever rank has the request; other signals stop no rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp.base import proc
from fsdp.base.phases import StopReason
from fsdp.config import StopSection
from fsdp.distributed import stop
from fsdp.distributed.env import DistEnv
from fsdp.distributed.stop import StopDecision, Stopper
from tests.support.world import run_world

ROOT = Path(__file__).parents[2]


def steps_until_stop(
    stopper: Stopper, before_step: dict[int, object], most: int = 6
) -> tuple[int, str | None]:
    """Run empty steps; the function of `before_step` for a step is called during it."""
    for step in range(most):
        stopper.begin(step)
        action = before_step.get(step)
        if callable(action):
            action()
        agreed = stopper.agreed()
        if agreed.stop:
            return step, agreed.stop
    return most, None


def signalled(env: DistEnv, run_dir: str, number: int, who: int) -> tuple[int, str | None]:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    stopper = Stopper(StopSection(), env, Path(run_dir), lambda: None)

    def send() -> None:
        if env.rank == who:
            os.kill(os.getpid(), number)

    try:
        return steps_until_stop(stopper, {2: send})
    finally:
        stopper.close()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_to_one_rank_stops_all_behind_one_step(tmp_path: Path, name: str) -> None:
    results = run_world(2, signalled, str(tmp_path), getattr(signal, name), 1)
    assert results == [(3, name), (3, name)]


def stopped_by_file(env: DistEnv, run_dir: str) -> tuple[int, str | None]:
    file = Path(run_dir, "STOP")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stop, "FILE_CHECK_S", 0.0)
        stopper = Stopper(StopSection(), env, Path(run_dir), lambda: None)
        try:
            return steps_until_stop(stopper, {1: file.touch})
        finally:
            stopper.close()


def test_the_stop_file_stops_this_run_and_not_the_next(tmp_path: Path) -> None:
    (tmp_path / "STOP").touch()  # left by a run before
    first = run_world(2, stopped_by_file, str(tmp_path))
    assert first in ([(1, "the stop file")] * 2, [(2, "the stop file")] * 2)
    assert not (tmp_path / "STOP").exists()


def stopped_by_deadline(
    env: DistEnv, run_dir: str, deadline_s: float, save_s: float
) -> tuple[int, str | None]:
    section = StopSection(deadline_s=proc.age_s() + deadline_s)
    stopper = Stopper(section, env, Path(run_dir), lambda: None, save_seconds=lambda: save_s)
    try:
        return steps_until_stop(stopper, {}, most=3)
    finally:
        stopper.close()


def test_the_deadline_leaves_the_time_that_a_save_takes(tmp_path: Path) -> None:
    assert run_world(2, stopped_by_deadline, str(tmp_path), 60.0, 5.0) == [(3, None)] * 2
    assert run_world(2, stopped_by_deadline, str(tmp_path), 60.0, 50.0) == [(0, "the deadline")] * 2


def stopped_at_end_time(env: DistEnv, run_dir: str) -> tuple[int, str | None]:
    stopper = Stopper(StopSection(), env, Path(run_dir), lambda: None, end_time=time.time() + 0.5)
    try:
        return steps_until_stop(stopper, {}, most=3)
    finally:
        stopper.close()


def test_the_end_of_the_job_is_a_deadline(tmp_path: Path) -> None:
    assert run_world(1, stopped_at_end_time, str(tmp_path)) == [(0, "the deadline")]


def stopped_by_launcher(env: DistEnv, run_dir: str) -> tuple[int, str | None]:
    reasons = iter([None, "node 3 goes away", None, None, None, None])
    stopper = Stopper(StopSection(), env, Path(run_dir), lambda: next(reasons) if env.rank == 1 else None)
    try:
        return steps_until_stop(stopper, {})
    finally:
        stopper.close()


def test_the_launcher_of_one_rank_stops_all(tmp_path: Path) -> None:
    assert run_world(2, stopped_by_launcher, str(tmp_path)) == [(1, "the launcher")] * 2


def saves_by_the_clock(env: DistEnv, run_dir: str) -> list[StopDecision]:
    stopper = Stopper(
        StopSection(), env, Path(run_dir), lambda: None, every_minutes=1e-9 if env.is_main else 1e9
    )
    seen = []
    for step in range(2):
        stopper.begin(step)
        seen.append(stopper.agreed())
    stopper.close()
    return seen


def test_the_clock_of_one_rank_decides_when_all_save(tmp_path: Path) -> None:
    assert run_world(2, saves_by_the_clock, str(tmp_path)) == [[StopDecision(None, True)] * 2] * 2


def asked_between_batches(env: DistEnv, run_dir: str) -> tuple[StopDecision, StopDecision]:
    stopper = Stopper(StopSection(), env, Path(run_dir), lambda: None)
    before = stopper.check_now()
    if env.rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    after = stopper.check_now()
    stopper.close()
    return before, after


def test_a_request_is_seen_between_two_batches_of_an_evaluation(tmp_path: Path) -> None:
    after = StopDecision(StopReason.SIGTERM, save=False)
    assert run_world(2, asked_between_batches, str(tmp_path)) == [(StopDecision(None, False), after)] * 2


def at_other_steps(env: DistEnv, run_dir: str) -> str:
    stopper = Stopper(StopSection(), env, Path(run_dir), lambda: None)
    stopper.begin(4 + env.rank)
    try:
        stopper.agreed()
    except Exception as error:
        return str(error)
    finally:
        stopper.close()
    return "nothing"


def test_ranks_at_different_steps_fail(tmp_path: Path) -> None:
    first, second = run_world(2, at_other_steps, str(tmp_path))
    assert first.startswith("rank 0 is at step 4, others are not")
    assert second.startswith("rank 1 is at step 5, others are not")


STUCK = """
import ctypes, sys, torch
from pathlib import Path
from fsdp.distributed import stop
from fsdp.config import StopSection
from fsdp.distributed.env import from_environment
stop.SECOND_SIGINT_S = float(sys.argv[2])
stopper = stop.Stopper(StopSection(), from_environment({}), Path(sys.argv[1]), lambda: None)
print("ready", flush=True)
if sys.argv[3] == "stuck":
    mutex = (ctypes.c_char * 64)()
    # the second lock never returns, and no handler runs
    for _ in range(2): ctypes.CDLL(None).pthread_mutex_lock(mutex)
while stopper._signals.first is None: pass
sys.stdin.read()
print("marked", stopper._signals.first.name)
"""


def interrupt_twice(tmp_path: Path, again_s: float, how: str) -> tuple[int, str]:
    command = [sys.executable, "-c", STUCK, str(tmp_path), str(again_s), how]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        while how == "stuck" and process.poll() is None:
            process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        return process.returncode, out


def test_a_second_ctrl_c_exits_at_once_even_while_the_main_thread_hangs_in_c(tmp_path: Path) -> None:
    code, _ = interrupt_twice(tmp_path, 0.01, "stuck")
    assert code == 130


@pytest.mark.long
def test_the_ctrl_c_that_torchrun_forwards_is_not_a_second_one(tmp_path: Path) -> None:
    assert interrupt_twice(tmp_path, 1000.0, "free") == (0, "marked SIGINT\n")
