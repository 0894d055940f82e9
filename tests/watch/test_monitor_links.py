"""Connections between monitors: which node is in reach, and which only waits for a processor."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from fsdp.watch.monitor_links import Head, MonitorConnection, Peer
from tests.support.processes import eventually


@pytest.fixture
def pair() -> Iterator[tuple[MonitorConnection, socket.socket]]:
    ear = socket.create_server(("127.0.0.1", 0))
    line = MonitorConnection(socket.create_connection(ear.getsockname()))
    other, _ = ear.accept()
    yield line, other
    line.close()
    other.close()
    ear.close()


def test_a_node_whose_kernel_acknowledges_is_in_reach_though_its_monitor_is_silent(
    pair: tuple[MonitorConnection, socket.socket],
) -> None:
    line, _ = pair
    line.last_sign_at -= 100
    line.check_acknowledged()
    assert line.silent_s < 1


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


def connect(head: Head, *peers: Peer) -> None:
    def met() -> bool:
        for peer in peers:
            peer.exchange({"ranks": []})
        head.exchange()
        return bool(head.reports)

    eventually("they connect", met, 10)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"[" * 60_000 + b"\n"])
def test_a_connection_of_another_program_is_closed(said: bytes) -> None:
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


def test_nodes_connect_by_their_token() -> None:
    ear = socket.create_server(("127.0.0.1", 0))
    address = ear.getsockname()
    head = Head(ear.detach(), "secret")
    stranger, peer = Peer([address], "guessed", "n3"), Peer([address], "secret", "n2")
    connect(head, stranger, peer)
    assert list(head.reports) == ["n2"]
    head.broadcast({"end": True})
    eventually("the peer receives the message", lambda: {"end": True} in peer.exchange({"ranks": []}), 10)
    for one in (head, stranger, peer):
        one.close()


def test_a_head_that_does_not_listen_yet_is_tried_again() -> None:
    ear = socket.socket()
    ear.bind(("127.0.0.1", 0))
    peer = Peer([ear.getsockname()], "secret", "n2")
    assert peer.exchange({}) == []
    assert peer.connection is None
    peer.tried_at -= 10
    ear.listen()
    head = Head(ear.detach(), "secret")
    connect(head, peer)
    assert list(head.reports) == ["n2"]
    head.close()
    peer.close()
