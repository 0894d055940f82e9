"""Connections between monitors: which node is in reach, and which only waits for a processor."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fsdp.watch import monitor_links
from fsdp.watch.messages import is_order, is_report, times_of
from fsdp.watch.monitor_links import RETURN_S, STRANGERS, Head, MonitorConnection, Peer
from fsdp.watch.observation import Observation
from fsdp.watch.rank import _listener
from tests.support.processes import eventually

REPORT: dict[str, Any] = {"ranks": [], "step_s": 0.0, "steps": {}, "spent": {}, "asked": False}


@pytest.fixture
def pair() -> Iterator[tuple[MonitorConnection, socket.socket]]:
    ear = socket.create_server(("127.0.0.1", 0))
    line = MonitorConnection(socket.create_connection(ear.getsockname()), is_order)
    other, _ = ear.accept()
    yield line, other
    line.close()
    other.close()
    ear.close()


def test_a_node_whose_kernel_acknowledges_is_in_reach_though_its_monitor_is_silent(
    pair: tuple[MonitorConnection, socket.socket],
) -> None:
    line, other = pair
    line.last_sign_at -= 100
    line.check_acknowledged()
    assert line.silent_s > 99  # its kernel may have a listener and no monitor
    other.sendall(b'{"alive": true}\n')
    eventually("its first message arrives", line.receive, 10)
    line.last_sign_at -= 100
    line.check_acknowledged()
    assert line.silent_s < 50


def test_a_node_that_acknowledges_nothing_is_not_in_reach(
    pair: tuple[MonitorConnection, socket.socket],
) -> None:
    line, other = pair
    other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deadline = time.monotonic() + 10
    while len(line._unsent) < 1 << 20 and time.monotonic() < deadline:  # nobody reads: its window fills
        line.send({"beat": "x" * 1_000_000})
    line.last_sign_at -= 100
    line.check_acknowledged()
    assert line.silent_s > 99


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
            peer.exchange(REPORT)
        head.exchange()
        return bool(head.reports)

    eventually("they connect", met, 10)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"secret", b"x" * 60_000])
def test_a_connection_that_does_not_show_the_token_is_closed(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_links, "STRANGER_S", 0.2)
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


def test_a_message_without_an_end_is_read_up_to_a_limit(
    pair: tuple[MonitorConnection, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_links, "LONGEST", 1 << 21)
    line, other = pair
    sender = threading.Thread(target=endless, args=(other,))
    sender.start()
    eventually("it is closed", lambda: line.receive() == [] and line.closed, 10)
    line.close()
    sender.join()
    assert len(line._received) < 1 << 22


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
    eventually("the peer has seen it", lambda: peer.exchange(REPORT) == [] and peer.tried_at, 10)
    again = Head(listener, "secret")
    peer.tried_at = 0.0
    connect(again, peer)
    old = again.connections["n2"]
    peer.close()  # now the peer's
    eventually("its end has been seen", lambda: old.receive() == [] and old.closed, 10)
    assert not old.gone
    old.last_sign_at -= RETURN_S
    assert old.gone
    peer.connection, peer.tried_at = None, 0.0
    eventually("it is back", lambda: (connect(again, peer), again.connections["n2"] is not old)[1], 10)
    assert not again.connections["n2"].gone
    again.close()
    peer.close()


def test_nodes_connect_by_their_token() -> None:
    ear = socket.create_server(("127.0.0.1", 0))
    address = ear.getsockname()
    head = Head(ear.detach(), "secret")
    stranger, peer = Peer(address, "guessed", "n3"), Peer(address, "secret", "n2")
    connect(head, stranger, peer)
    assert list(head.reports) == ["n2"]
    order = {"end": True, "failed": False}
    head.broadcast(order)
    eventually("the peer receives the message", lambda: order in peer.exchange(REPORT), 10)
    for one in (head, stranger, peer):
        one.close()


def test_a_head_that_does_not_listen_yet_is_tried_again() -> None:
    ear = socket.socket()
    ear.bind(("127.0.0.1", 0))
    peer = Peer(ear.getsockname(), "secret", "n2")
    assert peer.exchange(REPORT) == []
    assert peer.connection is None
    peer.tried_at -= 10
    ear.listen()
    head = Head(ear.detach(), "secret")
    connect(head, peer)
    assert list(head.reports) == ["n2"]
    head.close()
    peer.close()


def received(rank: dict[str, Any]) -> bool:
    """Whether a report with this rank has the form of one, after its way over the network."""
    return is_report(json.loads(json.dumps({**REPORT, "ranks": [rank]})))


FAILURE = {
    "time": 1.0, "kind": "full disk", "message": "m", "hint": "h", "ranks": [1], "secondary": False,
    "ours": True, "trace": "", "print": "p", "code": 4,
}  # fmt: skip


def test_a_report_of_another_form_is_left_out() -> None:
    rank = Observation(1, "n2", stack=(("a.py", 3, "f"),), threads={"t": (("b.py", 4, "g"),)}).encoded()
    assert received(rank)
    assert received({**rank, "failure": FAILURE})
    odd = {
        "still_s": float("nan"),
        "phase": "lunch",
        "rank": -1,
        "stack": [["a.py"]],
        "activity": 99,
        "step": "3",
    }
    for name, value in odd.items():
        assert not received({**rank, name: value}), name
    assert not received({name: value for name, value in rank.items() if name != "op"})
    assert not received({**rank, "more": 1})


def test_no_message_names_a_folder_outside_of_the_runs_own() -> None:
    rank = Observation(1, "n2").encoded()
    assert not received({**rank, "failure": {**FAILURE, "kind": "../../x"}})
    assert is_order({"keep": "full-disk-000003"})
    for folder in ("../../x", "nan-000003/../../..", "/nan-000003", "nan-000003\n", 3):
        assert not is_order({"keep": folder})


def test_times_of_another_form_are_left_out() -> None:
    good = {"forward": 1.0}
    report = {
        "steps": {"1": {"2": 0.1}, "3": {"2": [0.1]}, "4": {"x": 1}, "5": {}},
        "spent": {"1": good, "3": good, "4": good, "5": {"backward": 1.0}, "6": good},
    }
    assert times_of(report, frozenset(good)) == ({1: {2: 0.1}}, {1: good})


def test_a_nodes_odd_report_leaves_its_last_one() -> None:
    ear = socket.create_server(("127.0.0.1", 0))
    address = ear.getsockname()
    head = Head(ear.detach(), "secret")
    peer = Peer(address, "secret", "n2")
    connect(head, peer)
    assert peer.connection is not None
    peer.connection.send({"ranks": 3})
    peer.exchange({**REPORT, "step_s": 0.5})

    def arrived() -> bool:
        head.exchange()
        return head.reports["n2"]["step_s"] == 0.5

    eventually("the next report arrives", arrived, 10)
    assert not head.connections["n2"].closed
    head.close()
    peer.close()
