"""A rank's failure: its report, how its process ends, and the monitor that prints it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from asyncio import CancelledError
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest

from fsdp.base import proc
from fsdp.base.errors import (
    CheckpointError,
    ConfigError,
    LaunchError,
    NotFiniteError,
    OtherRankFailed,
    TrainingError,
)
from fsdp.config import WatchSection
from fsdp.distributed.env import DistEnv
from fsdp.memory.oom import OutOfMemory
from fsdp.watch import rank as watch_rank
from fsdp.watch import status_page
from fsdp.watch.monitor import MonitorOptions
from fsdp.watch.observe import NodeRanks
from fsdp.watch.rank import Watch, spawn
from fsdp.watch.status_page import FAILED, MONITOR, OVER, PID, STATE, StatusPage, failure_report
from tests.support.env import env_of
from tests.support.processes import command_line, eventually
from tests.support.world import run_world
from tests.watch.test_monitor import watched_by

ENV = env_of(2, 4, nodes=2)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("--a 1"), "config"),
        (LaunchError("no"), "launcher"),
        (CheckpointError("rank 2: x.distcp: it cannot be read"), "checkpoint"),
        (CheckpointError("x.distcp: no room", error_number=errno.ENOSPC), "full disk"),
        (CheckpointError("a folder named ENOSPC: it cannot be read"), "checkpoint"),
        (NotFiniteError("step 3: loss nan"), "nan"),
        (TrainingError("step 3: the words do not count: not finite"), "training"),
        (OutOfMemory("forward"), "memory"),
        (OSError(errno.ENOSPC, "No space left on device"), "full disk"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "memory"),
        (ValueError("a sample"), "exception"),
        (CancelledError(), "exception"),
    ],
)
def test_an_error_has_a_kind(error: BaseException, kind: str) -> None:
    report = failure_report(error, ENV)
    assert (report["kind"], report["secondary"]) == (kind, False)


@pytest.mark.parametrize(
    "error",
    [
        OtherRankFailed(0, "it broke", 4),
        RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3"),
        RuntimeError(
            "[../gloo/transport/tcp/buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"
        ),
        RuntimeError("NCCL error: remote process exited or there was a network error"),
    ],
)
def test_a_consequence_of_another_ranks_end_is_secondary(error: Exception) -> None:
    assert failure_report(error, ENV)["secondary"]


@pytest.mark.parametrize(
    ("error", "line", "hint"),
    [
        (MemoryError(), "MemoryError", "less on the host"),
        (ValueError("\n  what happened\nmore"), "ValueError: what happened", ""),
        (
            OSError(errno.EIO, "Input/output error", "/d/7"),
            "OSError: [Errno 5] Input/output error",
            "its server",
        ),
    ],
)
def test_an_error_is_one_line_and_has_a_hint_that_fits(error: Exception, line: str, hint: str) -> None:
    report = failure_report(error, ENV)
    assert report["message"].startswith(line)
    assert "\n" not in report["message"]
    assert hint in report["hint"]


# ---------------------------------------------------------------- the end of the process

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page() -> Iterator[StatusPage]:
    page = status_page.create()
    yield page
    page.close()


def options_of(page: StatusPage, run: Path, token: str = "") -> dict[str, Any]:
    options = MonitorOptions("n1", str(run), {0: watched_by(page)}, {"n1": [0]}, 0.0, 0.0, token)
    return asdict(options)


def state(pid: int) -> str:
    """As in /proc; X if the process is gone."""
    found = proc.stat(pid)
    return found.state if found is not None else "X"


ENDS = """
import atexit, os, sys, threading, time
from fsdp.watch import status_page as failure

class Teardown:
    def __del__(self, wait=time.sleep):
        wait(3600)

failure.EXIT_S = 1.0
end, kept = failure.ProcessExit(), Teardown()
atexit.register(print, "handler of a user", flush=True)
if "stuck" in sys.argv:
    failure.STUCK.set()
    atexit.register(time.sleep, 3600)
if "handler" in sys.argv:
    atexit.register(time.sleep, 3600)
if "thread" in sys.argv:
    threading.Thread(target=time.sleep, args=(3600,)).start()
sys.exit(end.leave(int(sys.argv[1])))
"""


def ends(code: int, stuck: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ENDS, str(code), stuck]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("stuck", "printed"), [("", True), ("handler", False), ("thread", False)])
def test_a_failed_process_ends_with_its_code_whatever_holds_it(stuck: str, printed: bool) -> None:
    done = ends(4, stuck)
    assert (done.returncode, done.stderr) == (4, "")
    assert (done.stdout == "handler of a user\n") is printed


# ---------------------------------------------------------------- the monitor


@pytest.mark.parametrize(("ended", "failed"), [(False, False), (True, True)])
def test_a_failed_rank_that_hangs_is_ended(
    page: StatusPage, ended: bool, failed: bool, tmp_path: Path
) -> None:
    rank = subprocess.Popen(["sleep", "3600"])
    try:
        page.numbers[PID], page.numbers[STATE] = rank.pid, FAILED
        ranks = NodeRanks({0: watched_by(page)}, "n1")
        ranks.observe(time.monotonic(), 0.0)
        ranks.end(failed)
        if ended:
            assert rank.wait(10) == -signal.SIGKILL
        assert rank.poll() == (-signal.SIGKILL if ended else None)
    finally:
        rank.kill()
        rank.wait()


def killed_monitor(env: DistEnv, folder: str) -> tuple[list[str], bool]:
    """What is said of a monitor that is killed, and whether another one then ends with the run."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(watch_rank.log, "warning", lambda text, *values: said.append(text % values))
        patched.setattr(watch_rank, "MONITOR_END_S", 60.0)
        patched.setattr(watch_rank, "STARTED_S", 0.0)
        with Watch(WatchSection(), env, Path(folder)) as watch:
            assert watch._monitor is not None
            numbers = cast(StatusPage, watch._page).numbers
            first = int(eventually("the monitor observes", lambda: numbers[MONITOR], 30))
            os.kill(first, signal.SIGKILL)
            eventually("another one observes", lambda: numbers[MONITOR] != first, 30)
            second = watch._monitor.process
    return said, second.pid != first and second.returncode == 0


def test_a_killed_monitor_is_announced_and_started_again(tmp_path: Path) -> None:
    [(said, observed)] = run_world(1, killed_monitor, str(tmp_path))
    assert len(said) == 1
    assert "SIGKILL" in said[0]
    assert observed


def test_what_starts_with_the_monitor_is_for_others_neither_ctrl_c_nor_its_token(
    page: StatusPage, tmp_path: Path
) -> None:
    """Before, it ended with a traceback, and the run was not watched."""
    page.numbers[PID] = os.getpid()
    token = "a token that only monitors see"
    monitor = spawn(options_of(page, tmp_path, token))
    assert token not in command_line(monitor.pid)
    monitor.send_signal(signal.SIGINT)
    monitor.send_signal(signal.SIGTERM)
    eventually("the monitor observes", lambda: page.numbers[MONITOR], 30)
    assert monitor.poll() is None
    assert monitor.stdin is not None
    monitor.stdin.close()
    monitor.kill()
    monitor.wait()


def leaves(env: DistEnv, folder: str) -> tuple[str, bool]:
    """As a model's file that lacks a package does. Its message, and whether the monitor has printed it."""
    try:
        with Watch(WatchSection(), env, Path(folder), process_ends=True) as watch:
            page = cast(StatusPage, watch._page)
            eventually("the monitor observes", lambda: page.numbers[MONITOR], 30)
            sys.exit("pip install it")
    except SystemExit:
        report, printed = page.read_failure(), status_page.wait_until_printed(page)
        page.numbers[STATE] = OVER  # this process of the tests lives on
        return report["message"] if report is not None else "", printed


def test_a_rank_that_calls_exit_says_so_and_was_not_killed(tmp_path: Path) -> None:
    assert run_world(1, leaves, str(tmp_path)) == [("SystemExit: pip install it", True)]
    file = tmp_path / "watch" / "verdicts.jsonl"

    def lines() -> list[str]:
        return file.read_text().splitlines() if file.exists() else []

    (said,) = eventually("its record", lines, 20)
    assert json.loads(said)["what"].endswith("failed: SystemExit: pip install it")
