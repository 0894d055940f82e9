"""One monitor over processes that stand for ranks: when it gives its verdict, and when it ends them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp.base import proc
from fsdp.watch import status_page
from fsdp.watch.monitor import ECHO_S, GRACE_S, Monitor
from fsdp.watch.monitor_options import MonitorOptions
from fsdp.watch.observation import Observation
from fsdp.watch.status_page import PID, STEP_S, StatusPage
from tests.support.processes import eventually


class SleepingRanks:
    """Processes that only sleep, each with a status page, and the monitor of their node in this process."""

    def __init__(self, count: int, run: Path) -> None:
        command = [sys.executable, "-S", "-c", "import time; time.sleep(100)"]
        self.processes = [subprocess.Popen(command) for _ in range(count)]
        self.pages: list[StatusPage] = []
        for process in self.processes:
            page = status_page.create(f"shardrun-test-{process.pid}.page")
            page.numbers[PID] = process.pid
            self.pages.append(page)
        paths = {rank: str(page.path) for rank, page in enumerate(self.pages)}
        nodes = {"n1": list(range(count))}
        self.monitor = Monitor(MonitorOptions("n1", str(run), paths, nodes, -1.0, 0.0, ""))
        self.now = time.monotonic()

    def judge_after(self, seconds: float) -> None:
        self.now += seconds
        self.monitor.ranks.observe(self.now, 0.0)
        self.monitor._judge(self.now)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.monitor.files.close()
        for one in self.monitor.ranks.ranks:
            one.page.close()
        for page in self.pages:
            page.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[[int], SleepingRanks]]:
    started: list[SleepingRanks] = []

    def start(count: int) -> SleepingRanks:
        started.append(SleepingRanks(count, tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.close()


def in_state(pid: int, state: str) -> Callable[[], bool]:
    def reached() -> bool:
        found = proc.stat(pid)
        return found is not None and found.state == state

    return reached


def test_a_rank_that_dies_while_the_others_are_stopped_is_named_and_the_others_ended(
    ranks: Callable[[int], SleepingRanks], capfd: pytest.CaptureFixture[str]
) -> None:
    world = ranks(2)
    stopped, killed = world.processes
    os.kill(stopped.pid, signal.SIGSTOP)
    os.kill(killed.pid, signal.SIGKILL)
    eventually("one is stopped", in_state(stopped.pid, "T"), 10)
    eventually("one is dead", in_state(killed.pid, "Z"), 10)
    for seconds in (0.0, ECHO_S + 1, GRACE_S + 1):
        world.judge_after(seconds)
    said = capfd.readouterr().err
    assert said.startswith("watch: rank 1 (n1) died without an error message")
    assert said.count("watch: ") == 1
    assert stopped.wait(10) == -signal.SIGKILL


ECHO = {
    "time": 1.0, "kind": "exception", "message": "Connection closed by peer", "hint": "", "ranks": [],
    "secondary": True, "ours": False, "trace": "", "print": "[rank 1] ended because another rank did",
}  # fmt: skip


def test_a_stopped_rank_whose_peer_has_given_up_is_named_once_and_ended(
    ranks: Callable[[int], SleepingRanks], capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing recovers after a rank has failed: no line says that the job may continue."""
    world = ranks(3)
    os.kill(world.processes[0].pid, signal.SIGSTOP)
    eventually("one is stopped", in_state(world.processes[0].pid, "T"), 10)
    world.pages[1].write_failure(ECHO)
    for seconds in (0.0, ECHO_S + 1, 0.2, 0.2, GRACE_S + 1):
        world.judge_after(seconds)
    said = capfd.readouterr().err
    assert said.count("watch: rank 0 (n1) is stopped (SIGSTOP)") == 1
    assert "unless it continues" not in said
    assert world.processes[0].wait(10) == -signal.SIGKILL


def test_what_a_rank_writes_while_it_stands_still_is_counted(
    ranks: Callable[[int], SleepingRanks], tmp_path: Path
) -> None:
    world = ranks(1)
    world.judge_after(0.0)
    [rank] = world.monitor.ranks.ranks
    rank.pid = os.getpid()  # in its place
    rank._at_move = None
    first = rank.observe(world.now)
    (tmp_path / "large").write_bytes(bytes(1 << 24))
    written = rank.observe(world.now + 1).io_bytes - first.io_bytes
    assert 1 << 24 <= written < 1 << 25


ATTACH, DETACH = 16, 17
"""Of ptrace."""


def test_a_rank_held_by_a_debugger_is_named_so(
    ranks: Callable[[int], SleepingRanks], capfd: pytest.CaptureFixture[str]
) -> None:
    """It answers nothing, and holds no lock of Python."""
    world = ranks(2)
    held = world.processes[1].pid
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(ATTACH, held, None, None):
        pytest.skip(f"ptrace: {os.strerror(ctypes.get_errno())}")
    eventually("it is held", in_state(held, "t"), 10)
    world.judge_after(0.0)
    for _ in range(2):
        world.monitor._decide(30.0, world.monitor.ranks.seen)
    libc.ptrace(DETACH, held, None, None)
    said = capfd.readouterr().err
    assert said.startswith("watch: rank 1 (n1) is stopped (a debugger): step 0, start\n")
    assert f"HINT: detach the debugger from process {held} on n1\n" in said


@pytest.mark.parametrize(("step_s", "ended_after_s"), [(0.0, 600), (0.5, 60)])
@pytest.mark.parametrize(
    ("does", "seen"),
    [
        ("prepares its data, 50.0", {"phase": "data", "process_cpu_s": 85.0}),
        ("waits for its data, 50.0", {"phase": "data"}),
        ("computes without end, 49.0", {"state": "R", "cpu_s": 49.0}),
        ("waits outside of any collective, 50.0", {}),
    ],
)
def test_the_first_step_of_a_start_has_ten_minutes(
    ranks: Callable[[int], SleepingRanks],
    capfd: pytest.CaptureFixture[str],
    does: str,
    seen: dict[str, Any],
    step_s: float,
    ended_after_s: int,
) -> None:
    """As its data set may build an index, and a library its kernels; later steps have a minute."""
    world = ranks(1)
    world.pages[0].numbers[STEP_S] = step_s
    world.judge_after(0.0)

    def judge_at(still_s: float) -> bool:
        """Twice, as a verdict needs; whether the rank still runs then."""
        one = Observation(0, "n1", step=1, answered=True, still_s=still_s, **seen)
        for _ in range(2):
            world.monitor._decide(still_s, [one])
        return world.processes[0].poll() is None

    assert judge_at(50.0)
    said = capfd.readouterr().err
    assert said.startswith(f"watch: rank 0 (n1) {does} s by now: step 1, ")
    assert f"ends the job in {ended_after_s - 50} s unless it continues" in said
    assert judge_at(ended_after_s - 1.0)
    assert not judge_at(ended_after_s + 1.0)
