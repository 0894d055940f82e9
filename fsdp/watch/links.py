"""TCP connections between the monitors of several nodes: the head listens, the others connect and report.

The head is the monitor on rank 0's node. It listens on its address towards the other nodes alone, and until a
connection has shown the run's token reads nothing of it but a greeting. Messages are JSON lines: a node's
are its ranks' observations, the head's are orders. No side waits for the other: a message that cannot be sent
at once is dropped. Both send several times a second, so that the kernel ends the connection if the other
node acknowledges nothing for SILENT_S: it is out of reach. One whose monitor only waits for a processor still
acknowledges. Messages do not go over the run directory: shared storage may delay a file for longer than that,
and may work while the ranks' own network does not.

Orders: alive, printed, done, and end with failed. A connection with bytes of another form is closed.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsdp.watch.observe import Observation, decode

SILENT_S = 3.0
RETURN_S = 2.0
"""A monitor that was killed is started again, and connects again by then; else its node's processes are gone.
Shorter than monitor.ECHO_S, after which the failures of other ranks are printed.
"""
STRANGERS, STRANGER_S = 64, 3.0
"""Connections that have not shown the token yet: how many are kept, the newest, and for how long."""
GREETING = 512
"""Bytes of the first line on a connection, TOKEN NODE."""
CONNECT_S, RETRY_S = 0.5, 1.0
MOST_UNSENT = 1 << 22
"""Bytes. With this much unsent, further messages are dropped."""
LONGEST = 1 << 26
"""Bytes of one message: a longer one is of another program, and its connection is closed."""
OUT_OF_REACH = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


def read_report(message: Mapping[str, Any]) -> list[Observation]:
    return [decode(data) for data in message["ranks"]]


class Link:
    """One connection, non-blocking. `read`: what a received message is. `greeting`: what is sent first."""

    def __init__(
        self, connection: socket.socket, read: Callable[[dict[str, Any]], Any], greeting: bytes = b""
    ) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # closed already, which the first message shows
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENT_S))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._read = connection, read
        self._received, self._unsent = bytearray(), greeting
        self.heard_at, self._heard = time.monotonic(), False
        self.closed = self._out_of_reach = False

    def send(self, message: Mapping[str, Any]) -> None:
        if len(self._unsent) < MOST_UNSENT:
            self._unsent += json.dumps(message, default=vars).encode() + b"\n"
        try:
            while self._unsent and not self.closed:
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(error)

    def receive(self) -> list[Any]:
        """All messages that have arrived."""
        try:
            while not self.closed:
                if not (more := self._connection.recv(1 << 20)) or len(self._received) > LONGEST:
                    raise ConnectionError
                self.heard_at, self._heard = time.monotonic(), True
                self._received += more
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(error)
        *lines, self._received = self._received.split(b"\n")
        try:
            return [self._read(json.loads(line)) for line in lines]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.closed = True
            return []

    def _end(self, error: OSError) -> None:
        self.closed, self._out_of_reach = True, error.errno in OUT_OF_REACH

    def unseen(self) -> dict[str, Any]:
        """Fields for the observations of the node's ranks; none while its monitor reports or may return."""
        silent_s = time.monotonic() - self.heard_at
        if self._out_of_reach:
            return {"silent_node_s": silent_s, "monitor_ended": False}
        if self.closed:
            return {"silent_node_s": silent_s, "monitor_ended": True} if silent_s > RETURN_S else {}
        # a head that has never sent anything may be only the listener, in rank 0
        return {} if self._heard or silent_s <= SILENT_S else {"silent_node_s": silent_s}

    def close(self) -> None:
        self._connection.close()


class Head:
    """The head's side: the connections to all other nodes, and the last report of each."""

    def __init__(self, listener: int, token: str) -> None:
        self._listener = socket.socket(fileno=listener)
        self._listener.setblocking(False)
        self._token = token.encode()
        self._strangers: list[tuple[socket.socket, float]] = []
        self.links: dict[str, Link] = {}
        self.reports: dict[str, list[Observation]] = {}

    def exchange(self) -> None:
        """Accept new nodes, read reports, send a sign of life."""
        self._accept()
        for node, link in self.links.items():
            for ranks in link.receive():
                self.reports[node] = ranks
        self.broadcast(alive=True)

    def _accept(self) -> None:
        now = time.monotonic()
        # none waits, or it has gone again; without a free descriptor the next round, after some were closed
        with contextlib.suppress(OSError):
            for _ in range(2 * STRANGERS):
                connection = self._listener.accept()[0]
                connection.setblocking(False)
                self._strangers.append((connection, now))
        waiting = []
        for connection, since in self._strangers:
            node = self._node_of(connection)
            if node is None and now - since < STRANGER_S:
                waiting.append((connection, since))
            elif node:
                if node in self.links:  # its monitor was started again
                    self.links[node].close()
                self.links[node] = Link(connection, read_report)
            else:
                connection.close()
        self._strangers = waiting[-STRANGERS:]
        for connection, _ in waiting[:-STRANGERS]:
            connection.close()

    def _node_of(self, connection: socket.socket) -> str | None:
        """Of a greeting; empty for what is none, None while it may still come."""
        try:
            greeting = connection.recv(GREETING, socket.MSG_PEEK)
        except BlockingIOError:
            return None
        except OSError:
            return ""
        line, end, _ = greeting.partition(b"\n")
        token, _, node = line.partition(b" ")
        if end and hmac.compare_digest(token, self._token):
            connection.recv(len(line) + 1)
            return node.decode()
        return None if greeting and not end and len(greeting) < GREETING else ""

    def broadcast(self, **order: Any) -> None:
        for link in self.links.values():
            link.send(order)

    def observations(self) -> list[Observation]:
        """Of the other nodes' ranks; those of a node that is out of reach or gone are marked so."""
        return [
            e if e.has_left else replace(e, **self.links[node].unseen())
            for node, ranks in self.reports.items()
            for e in ranks
        ]

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        for connection in (self._listener, *(stranger for stranger, _ in self._strangers)):
            connection.close()


class Peer:
    """The side of every other node. `link` is None until the head has been reached."""

    def __init__(self, head: tuple[str, int], token: str, node: str) -> None:
        self._head, self._greeting = head, f"{token} {node}\n".encode(errors="backslashreplace")
        self.link: Link | None = None
        self.tried_at = 0.0

    def exchange(self, ranks: Sequence[Observation]) -> list[dict[str, Any]]:
        """Send a report; returns the head's orders."""
        now = time.monotonic()
        if (self.link is None or self.link.closed) and now - self.tried_at >= RETRY_S:
            self.tried_at = now
            with contextlib.suppress(OSError):  # not yet, or gone
                connection = socket.create_connection(self._head, CONNECT_S)
                self.close()
                self.link = Link(connection, dict, self._greeting)
        if self.link is None:
            return []
        self.link.send({"ranks": ranks})
        orders: list[dict[str, Any]] = self.link.receive()
        return orders

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
