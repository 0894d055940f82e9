"""One monitor over processes that stand for ranks, and the connections between monitors of several nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp.base import proc
from fsdp.base.phases import Activity
from fsdp.watch import links, status_page
from fsdp.watch.links import RETURN_S, STRANGERS, Head, Link, Peer
from fsdp.watch.monitor import ECHO_S, GRACE_S, Monitor, MonitorOptions
from fsdp.watch.observe import Observation
from fsdp.watch.rank import _listener
from fsdp.watch.status_page import PID, StatusPage
from tests.support.processes import eventually


def watched_by(page: StatusPage) -> tuple[int, int, str]:
    """As a rank without a responder has it."""
    return os.dup(page.descriptor), os.memfd_create("stacks"), ""


class SleepingRanks:
    """Processes that only sleep, each with a status page, and the monitor of their node in this process."""

    def __init__(self, count: int, run: Path) -> None:
        command = [sys.executable, "-S", "-c", "import time; time.sleep(100)"]
        self.processes = [subprocess.Popen(command) for _ in range(count)]
        self.pages: list[StatusPage] = []
        for process in self.processes:
            page = status_page.create()
            page.numbers[PID] = process.pid
            self.pages.append(page)
        watched = {rank: watched_by(page) for rank, page in enumerate(self.pages)}
        nodes = {"n1": list(range(count))}
        self.monitor = Monitor(MonitorOptions("n1", str(run), watched, nodes, -1.0, 0.0, ""))
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


@pytest.mark.parametrize(("step_s", "ended_after_s"), [(0.0, 600), (0.5, 60)])
@pytest.mark.parametrize(
    ("does", "seen"),
    [
        ("prepares its data, 50.0", {"phase": "data", "process_cpu_s": 85.0}),
        ("waits for its data, 50.0", {"phase": "data"}),
        ("computes without end, 49.0", {"state": "R", "cpu_s": 49.0}),
        ("waits outside of any collective, 50.0", {}),
        ("waits for its data, 50.0", {"phase": "evaluate", "activity": Activity.DATA}),
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
    """As its data set may build an index, and a library its kernels; so have the data of an evaluation. Later
    steps have a minute.
    """
    if seen.get("phase") == "evaluate":
        ended_after_s = 600
    world = ranks(1)
    world.judge_after(0.0)

    def judge_at(still_s: float) -> bool:
        """Twice, as a verdict needs; whether the rank still runs then."""
        one = Observation(0, "n1", step=1, answered=True, still_s=still_s, step_s=step_s, **seen)
        for _ in range(2):
            world.monitor._decide(still_s, [one], 6.0)
        return world.processes[0].poll() is None

    assert judge_at(50.0)
    said = capfd.readouterr().err
    assert said.startswith(f"watch: rank 0 (n1) {does} s by now: step 1, ")
    assert f"ends the job in {ended_after_s - 50} s unless it continues" in said
    assert judge_at(ended_after_s - 1.0)
    assert not judge_at(ended_after_s + 1.0)


# ---------------------------------------------------------------- several nodes


@pytest.fixture
def pair() -> Iterator[tuple[Link, socket.socket]]:
    ear = socket.create_server(("127.0.0.1", 0))
    link = Link(socket.create_connection(ear.getsockname()))
    other, _ = ear.accept()
    yield link, other
    link.close()
    other.close()
    ear.close()


def test_a_head_that_has_never_answered_is_unseen_after_a_while(pair: tuple[Link, socket.socket]) -> None:
    """Its kernel may have only a listener: bench/faults.py has nodes whose kernel acknowledges nothing."""
    link, other = pair
    assert link.unseen() == {}
    link.heard_at -= 100
    assert link.unseen()["silent_node_s"] > 99
    other.sendall(b'{"alive": true}\n')
    eventually("its first message arrives", link.receive, 10)
    link.heard_at -= 100
    assert link.unseen() == {}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_head_listens_where_another_node_reaches_it_and_nowhere_else(address: str) -> None:
    if ":" in address and not socket.has_dualstack_ipv6():
        pytest.skip("this system has no IPv6")
    listener = _listener(["", address])
    assert listener is not None
    meeting = listener.getsockname()[:2]
    assert meeting[0] == address
    head = Head(listener.detach(), "secret")
    peer = Peer(meeting, "secret", "n2")
    connect(head, peer)
    assert list(head.reports) == ["n2"]
    peer.close()
    head.close()


def connect(head: Head, *peers: Peer) -> None:
    def met() -> bool:
        for peer in peers:
            peer.exchange([])
        head.exchange()
        return bool(head.reports)

    eventually("they connect", met, 10)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"secret", b"x" * 60_000])
def test_a_connection_that_does_not_show_the_token_is_closed(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "STRANGER_S", 0.2)
    ear = socket.create_server(("127.0.0.1", 0))
    address = ear.getsockname()
    head = Head(ear.detach(), "secret")
    with socket.create_connection(address) as stranger:
        stranger.sendall(said)
        stranger.settimeout(0.05)

        def is_closed() -> bool:
            head.exchange()
            try:
                return stranger.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionResetError:
                return True

        eventually("it is closed", is_closed, 10)
    assert not head.reports
    head.close()


def test_of_many_idle_connections_few_are_kept_and_a_node_connects_beside_them() -> None:
    ear = socket.create_server(("127.0.0.1", 0), backlog=1024)
    address = ear.getsockname()
    head = Head(ear.detach(), "secret")
    flood = [socket.create_connection(address) for _ in range(3 * STRANGERS)]
    peer = Peer(address, "secret", "n2")
    connect(head, peer)
    closed = 0
    for one in flood:
        one.settimeout(0.01)
        with contextlib.suppress(TimeoutError):
            closed += one.recv(1) == b""
        one.close()
    assert closed == 2 * STRANGERS
    peer.close()
    head.close()


def test_a_message_without_an_end_is_read_up_to_a_limit(pair: tuple[Link, socket.socket]) -> None:
    link, other = pair
    link.longest = 1 << 21
    sender = threading.Thread(target=endless, args=(other,))
    sender.start()
    eventually("it is closed", lambda: link.receive() == [] and link.closed, 10)
    link.close()
    sender.join()
    assert len(link._received) < 1 << 22


def endless(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(b"x" * (1 << 20))


def test_a_monitor_that_is_started_again_connects_again() -> None:
    ear = socket.create_server(("127.0.0.1", 0))
    address, listener = ear.getsockname(), ear.detach()
    head, peer = Head(os.dup(listener), "secret"), Peer(address, "secret", "n2")
    connect(head, peer)
    head.close()
    eventually("the peer has seen it", lambda: peer.exchange([]) == [] and peer.tried_at, 10)
    again = Head(listener, "secret")
    peer.tried_at = 0.0
    connect(again, peer)
    old = again.links["n2"]
    peer.close()  # now the peer's
    eventually("its end has been seen", lambda: old.receive() == [] and old.closed, 10)
    assert not old.unseen()
    old.heard_at -= RETURN_S
    assert old.unseen()["monitor_ended"]
    peer.link, peer.tried_at = None, 0.0

    def is_back() -> bool:
        connect(again, peer)
        return again.links["n2"] is not old

    eventually("it is back", is_back, 10)
    assert not again.links["n2"].unseen()
    again.close()
    peer.close()
