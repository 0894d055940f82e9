"""How a failed rank ends: its failure printed, with its exit code, after its atexit handlers, and soon."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from bench.ports import free_port
from fsdp.base import proc
from fsdp.config import WatchSection
from fsdp.dist.env import DistEnv
from fsdp.watch import last_process, status_page
from fsdp.watch import rank as watch_rank
from fsdp.watch.last_process import wait_until_printed
from fsdp.watch.monitor_options import MonitorOptions
from fsdp.watch.node_ranks import NodeRanks
from fsdp.watch.rank import Watch, _pid_namespace, _spawn, remove_stale_names, write_torchrun_error_file
from fsdp.watch.records import RecordFiles
from fsdp.watch.status_page import FAILED, MONITOR, OVER, PID, PRINTED, STATE, StatusPage
from tests.rundir.test_lock_hidden import in_namespaces
from tests.support.marks import sample_are
from tests.support.processes import command_line, eventually
from tests.support.world import run_world

ROOT = Path(__file__).parents[2]
SOON_S = last_process.EXIT_S - 1
"""From a rank's exception until all ranks are gone: before the limit that ends a rank which hangs."""


@pytest.fixture
def page() -> Iterator[StatusPage]:
    own = status_page.create(f"shardrun-test-{os.getpid()}-{threading.get_ident()}.page")
    yield own
    own.path.unlink(missing_ok=True)
    own.close()


def state(pid: int) -> str:
    """As in /proc; X if the process is gone."""
    found = proc.stat(pid)
    return found.state if found is not None else "X"


# ---------------------------------------------------------------- waiting for the monitor to print


def test_a_failure_that_was_printed_is_not_waited_for(page: StatusPage) -> None:
    page.numbers[PRINTED] = 1
    assert wait_until_printed(page)


def test_a_monitor_that_has_ended_is_not_waited_for(page: StatusPage) -> None:
    over = subprocess.Popen(["true"])
    page.numbers[MONITOR] = over.pid  # a zombie of ours
    assert not wait_until_printed(page)
    over.wait()


def test_of_two_failures_in_one_second_torchrun_takes_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    for secondary in (True, False):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{secondary}"))
        write_torchrun_error_file({"time": 5.5, "secondary": secondary, "message": "it broke"})
        told.append(json.loads((tmp_path / f"{secondary}").read_text())["message"])
    first = min(told, key=lambda one: int(one["extraInfo"]["timestamp"]))  # as ChildFailedError does
    assert first["message"] == "it broke"


# ---------------------------------------------------------------- the end of the process

ENDS = """
import atexit, os, sys, threading, time
from fsdp.watch import last_process

class Teardown:
    def __del__(self, wait=time.sleep):
        wait(3600)

last_process.EXIT_S = 1.0
end, kept = last_process.ProcessExit(), Teardown()
atexit.register(print, "handler of a user", flush=True)
if "stuck" in sys.argv:
    last_process.any_stuck = lambda: True
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


def test_a_process_whose_server_of_records_is_away_ends_though_its_library_waits_again() -> None:
    assert ends(0, "stuck").returncode == 0


def test_a_process_that_succeeds_ends_after_its_handlers_without_teardown() -> None:
    done = ends(0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "handler of a user\n", "")


@pytest.mark.parametrize(("stuck", "printed"), [("", True), ("handler", False), ("thread", False)])
def test_a_failed_process_ends_with_its_code_whatever_holds_it(stuck: str, printed: bool) -> None:
    done = ends(4, stuck)
    assert (done.returncode, done.stderr) == (4, "")
    assert (done.stdout == "handler of a user\n") is printed


NCCL_STAND_IN = """
import sys, threading, torch, torch.distributed as dist
from fsdp.dist import env, process_group

process_group.ABORT_S = 1.0
for name in sys.argv[1:]:  # as NCCL's, which wait for kernels that never end
    setattr(dist.ProcessGroup, name, lambda *_: threading.Event().wait())
here = env.DistEnv(
    rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1,
    device=torch.device("cpu"), launcher="",
)
with process_group.process_group(here, 600):
    raise ValueError("this rank has failed")
"""


@pytest.mark.parametrize("stuck", ["shutdown", "shutdown abort"])
def test_after_an_exception_no_group_is_destroyed(stuck: str) -> None:
    """A stand-in for NCCL: destroy_process_group calls `shutdown`."""
    command = [sys.executable, "-c", NCCL_STAND_IN, *stuck.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "ValueError: this rank has failed" in done.stderr
    assert ("are not aborted after 1 s" in done.stderr) is ("abort" in stuck)


def start(rank: int, port: int, folder: Path, *flags: str) -> subprocess.Popen[str]:
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_PORT": port,
    }
    environ = os.environ | {name: str(value) for name, value in variables.items()}
    words = (
        "--model.name tests.watch.leaving:Fails --data.name tests.support.user_code:vectors "
        f"--train.steps 9 --train.global_batch 12 --checkpoint.every_steps 0 --checkpoint.export false "
        f"--run.dir {folder / 'run'}"
    )
    return subprocess.Popen(
        [sys.executable, "train.py", *words.split(), *flags],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env=environ | {"MASTER_ADDR": "127.0.0.1", "LEAVING": str(folder), "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.slow
@pytest.mark.parametrize("watched", sample_are(["true"], ["true", "false"]))
def test_both_ranks_end_soon_and_call_their_atexit_handlers(watched: str, tmp_path: Path) -> None:
    port = free_port()
    ranks = [start(rank, port, tmp_path, "--watch.enabled", watched) for rank in range(2)]
    try:
        eventually("rank 1 fails", (tmp_path / "failed").exists, 180)
        began = time.monotonic()
        ranks[1].wait(120)
        ranks[0].send_signal(signal.SIGTERM)  # as torchrun does when a rank has left
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
        took = time.monotonic() - began
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    assert [one.returncode for one in ranks] == [1, 1], said
    assert sorted(path.name for path in tmp_path.glob("left-*")) == ["left-0", "left-1"]
    assert took < SOON_S
    text = "".join(said)
    assert text.count("ValueError: a sample of a length that nobody expected") == 1
    assert "[rank 1] failed on cpu" in text


# ---------------------------------------------------------------- the monitor


@pytest.mark.parametrize(("ended", "failed"), [(False, False), (True, True)])
def test_a_failed_rank_that_hangs_is_ended(
    page: StatusPage, ended: bool, failed: bool, tmp_path: Path
) -> None:
    rank = subprocess.Popen(["sleep", "3600"])
    try:
        page.numbers[PID], page.numbers[STATE] = rank.pid, FAILED
        ranks = NodeRanks({0: str(page.path)}, "n1", RecordFiles(tmp_path))
        ranks.observe(time.monotonic(), 0.0)
        assert ranks.end(failed) is ended
        if ended:
            assert rank.wait(10) == -signal.SIGKILL
        assert rank.poll() == (-signal.SIGKILL if ended else None)
    finally:
        rank.kill()
        rank.wait()


def stopped_monitor(env: DistEnv, folder: str) -> int | None:
    """The monitor's exit code at the run's end, which waits a minute for it here."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(watch_rank, "MONITOR_END_S", 60.0)
        with Watch(WatchSection(), env, Path(folder)) as watch:
            monitor = watch._monitor
            assert monitor is not None
            eventually("the monitor observes", lambda: watch._page and watch._page.numbers[MONITOR], 30)
            monitor.send_signal(signal.SIGSTOP)
            eventually("it is stopped", lambda: state(monitor.pid) == "T", 10)
    return monitor.poll()


def test_a_stopped_monitor_ends_with_its_run(tmp_path: Path) -> None:
    assert run_world(1, stopped_monitor, str(tmp_path)) == [0]


def killed_monitor(env: DistEnv, folder: str) -> tuple[list[str], bool]:
    """What is said of a monitor that is killed, and whether another one then ends with the run."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(watch_rank.log, "warning", lambda text, *values: said.append(text % values))
        patched.setattr(watch_rank, "MONITOR_END_S", 60.0)
        patched.setattr(watch_rank, "STARTED_S", 0.0)
        with Watch(WatchSection(), env, Path(folder)) as watch:
            numbers = cast(StatusPage, watch._page).numbers
            first = int(eventually("the monitor observes", lambda: numbers[MONITOR], 30))
            os.kill(first, signal.SIGKILL)
            eventually("another one observes", lambda: numbers[MONITOR] != first, 30)
            second = cast(subprocess.Popen[str], watch._monitor)
    return said, second.pid != first and second.returncode == 0


def test_a_killed_monitor_is_announced_and_started_again(tmp_path: Path) -> None:
    [(said, observed)] = run_world(1, killed_monitor, str(tmp_path))
    assert len(said) == 1
    assert "SIGKILL" in said[0]
    assert observed


def test_a_stopped_monitor_ends_though_its_rank_was_killed(page: StatusPage, tmp_path: Path) -> None:
    rank = os.fork()
    if not rank:
        page.numbers[PID] = os.getpid()
        options = MonitorOptions("n1", str(tmp_path), {0: str(page.path)}, {"n1": [0]}, 0.0, 0.0, "")
        _spawn(options)
        time.sleep(3600)
    try:
        monitor = int(eventually("the monitor observes", lambda: page.numbers[MONITOR], 30))
        os.kill(monitor, signal.SIGSTOP)
        eventually("it is stopped", lambda: state(monitor) == "T", 10)
    finally:
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
    eventually("the monitor ends", lambda: state(monitor) in "ZX", 15)


def test_what_starts_with_the_monitor_is_for_others_neither_ctrl_c_nor_its_token(
    page: StatusPage, tmp_path: Path
) -> None:
    """Before, it ended with a traceback, and the run was not watched."""
    page.numbers[PID] = os.getpid()
    token = "a token that only monitors see"
    monitor = _spawn(MonitorOptions("n1", str(tmp_path), {0: str(page.path)}, {"n1": [0]}, 0.0, 0.0, token))
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
        failure, printed = page.read_failure(), wait_until_printed(page)
        page.numbers[STATE] = OVER  # this process of the tests lives on
        return failure["message"] if failure is not None else "", printed


def test_a_rank_that_calls_exit_says_so_and_was_not_killed(tmp_path: Path) -> None:
    assert run_world(1, leaves, str(tmp_path)) == [("SystemExit: pip install it", True)]
    file = tmp_path / "watch" / "verdicts.jsonl"

    def lines() -> list[str]:
        return file.read_text().splitlines() if file.exists() else []

    (said,) = eventually("its record", lines, 20)
    assert json.loads(said)["what"].endswith("failed: SystemExit: pip install it")


UNSEEN = """
import os, sys
from pathlib import Path
from fsdp.config import WatchSection
from fsdp.dist import collectives, env
from fsdp.dist.process_group import free_ended_groups, process_group
from fsdp.watch.rank import Watch

here = env.from_environment()
with process_group(here, 60), Watch(WatchSection(), here, Path(sys.argv[1])) as watch:
    watch.phase("data", 1)
    print(watch._monitor, collectives.all_gather_objects(here.rank))
free_ended_groups()  # gloo's thread may free its last tensor late: at Python's end that is a SIGABRT
"""


@pytest.mark.slow
@pytest.mark.parametrize("why", ["the /proc of another PID namespace", "no room for a socket's path"])
def test_a_rank_that_no_monitor_could_observe_is_not_watched(why: str, tmp_path: Path) -> None:
    """Before, the first was said to have died: its process id is another process in that /proc."""
    space, prepare = ["unshare", "--mount", "--pid", "--fork", "--kill-child"], "true"
    if "socket" in why:
        (tmp_path / ("x" * 100)).mkdir()
        space, prepare = ["unshare", "--mount"], "mount -t tmpfs -o size=4k,nr_inodes=1 none /dev/shm"
        prepare += f" && export TMPDIR={tmp_path / ('x' * 100)}"
    run = tmp_path / "run"
    said = in_namespaces(
        space, f"{prepare} && exec 2> {tmp_path / 'log'}", sys.executable, "-c", UNSEEN, str(run)
    )
    assert said == "None [0]\n"
    log = (tmp_path / "log").read_text()
    assert ("/proc is of another PID namespace" if "/proc" in why else "AF_UNIX path too long") in log
    assert not (run / "watch").exists()


def test_files_of_killed_ranks_are_removed() -> None:
    over = subprocess.Popen(["true"])
    over.wait()
    space = _pid_namespace()
    dead, ours = (
        status_page.folders()[0] / f"shardrun-{space}-{pid}-test.sock" for pid in (over.pid, os.getpid())
    )
    for one in (dead, ours):
        one.touch()
    remove_stale_names()
    assert not dead.exists()
    assert ours.exists()
    ours.unlink()
