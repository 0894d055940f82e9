"""Two monitors' line: who is heard, who is out of reach, and who only waits for a processor."""

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


def test_a_node_whose_kernel_confirms_is_in_reach_though_its_monitor_says_nothing(
    pair: tuple[MonitorConnection, socket.socket],
) -> None:
    line, _ = pair
    line.last_sign_at -= 100
    line.check_acknowledged()
    assert line.silent_s < 1


def test_a_node_that_confirms_nothing_is_not(pair: tuple[MonitorConnection, socket.socket]) -> None:
    line, other = pair
    other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deadline = time.monotonic() + 10
    while len(line._unsent) < 1 << 20 and time.monotonic() < deadline:  # nobody reads: its window fills
        line.send({"beat": "x" * 1_000_000})
    line.last_sign_at -= 100
    line.check_acknowledged()
    assert line.silent_s > 99


def meet(head: Head, *peers: Peer) -> None:
    def met() -> bool:
        for peer in peers:
            peer.exchange({"ranks": []})
        head.exchange()
        return bool(head.reports)

    eventually("they meet", met, 10)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"[" * 60_000 + b"\n"])
def test_who_speaks_another_language_is_sent_away(said: bytes) -> None:
    ear = socket.create_server(("127.0.0.1", 0))
    address = ear.getsockname()
    head = Head(ear.detach(), "secret")
    with socket.create_connection(address) as stranger:
        stranger.sendall(said)
        stranger.settimeout(0.05)

        def sent_away() -> bool:
            head.exchange()
            try:
                return stranger.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionResetError:
                return True

        eventually("it is sent away", sent_away, 10)
    assert not head.reports
    head.close()


def test_nodes_meet_by_a_word_that_only_they_know() -> None:
    ear = socket.create_server(("127.0.0.1", 0))
    address = ear.getsockname()
    head = Head(ear.detach(), "secret")
    stranger, peer = Peer([address], "guessed", "n3"), Peer([address], "secret", "n2")
    meet(head, stranger, peer)
    assert list(head.reports) == ["n2"]
    head.broadcast({"end": True})
    eventually("the peer hears the head", lambda: {"end": True} in peer.exchange({"ranks": []}), 10)
    for one in (head, stranger, peer):
        one.close()


def test_a_head_that_is_not_there_yet_is_tried_again() -> None:
    ear = socket.socket()
    ear.bind(("127.0.0.1", 0))
    peer = Peer([ear.getsockname()], "secret", "n2")
    assert peer.exchange({}) == []
    assert peer.connection is None
    peer.tried_at -= 10
    ear.listen()
    head = Head(ear.detach(), "secret")
    meet(head, peer)
    assert list(head.reports) == ["n2"]
    head.close()
    peer.close()
