"""TCP connections between the monitors of several nodes: the head listens, the others connect and report.

The head is the monitor on rank 0's node. It listens on its address towards the other nodes alone, and until a
connection has shown the run's token reads nothing of it but a greeting. Messages are JSON lines. No side
waits for the other: a message that cannot be sent at once is dropped, and a node without a sign of life for
SILENT_S is out of reach, on either side. Messages do not go over the run directory: shared storage may delay
a file for longer than that, and may work while the ranks' own network does not.

A node reports its ranks (observations), step_s, steps, spent and asked. The head sends alive, ask, keep (the
folder of a verdict in RUN/watch), printed, done, and end with failed. A connection with bytes of another form
is closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import re
import socket
import termios
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp.watch.observation import Observation, decode

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
FOLDER = re.compile(r"[a-z]+(-[a-z]+)*-\d{6,19}")
"""KIND-STEP, the folder of a verdict: a name that stays in RUN/watch."""


@dataclass(frozen=True)
class Report:
    """What a node says of its ranks."""

    ranks: list[Observation]
    step_s: float
    steps: dict[int, dict[int, float]]
    """By rank: step → own work in seconds."""
    spent: dict[int, dict[str, float]]
    asked: bool = False
    """It follows a request to the responders."""

    def encoded(self) -> dict[str, Any]:
        return {**vars(self), "ranks": [e.encoded() for e in self.ranks]}


def read_report(message: dict[str, Any]) -> Report:
    """Raises KeyError, TypeError, AttributeError or ValueError for a message of another form."""
    steps = {
        int(rank): {int(step): float(work) for step, work in rows.items()}
        for rank, rows in message["steps"].items()
    }
    spent = {
        int(rank): {str(name): float(value) for name, value in times.items()}
        for rank, times in message["spent"].items()
    }
    ranks = [decode(data) for data in message["ranks"]]
    return Report(ranks, float(message["step_s"]), steps, spent, bool(message["asked"]))


def read_order(message: dict[str, Any]) -> dict[str, Any]:
    """A message of the head."""
    if not FOLDER.fullmatch(message.get("keep", "a-000000")):
        raise ValueError("a folder outside RUN/watch")
    return dict(message)


class MonitorConnection:
    """One connection in both directions, non-blocking. `read`: what a received message is.

    `heard`: the other side has sent something. `greeting`: what is sent first.
    """

    def __init__(
        self,
        connection: socket.socket,
        read: Callable[[dict[str, Any]], Any],
        *,
        heard: bool = False,
        greeting: bytes = b"",
    ) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # closed already, which the first message shows
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._received, self._unsent = connection, bytearray(), greeting
        self.last_sign_at = time.monotonic()
        self.closed = False
        self._read, self._heard = read, heard

    def check_acknowledged(self) -> None:
        """Call before sending: a kernel that has acknowledged all earlier bytes is in reach.

        Its monitor may be silent all the same, because it waits for a processor. Of a head that has never
        sent anything only the listener may be left, in rank 0.
        """
        left = array("i", [0])
        if self.closed or self._unsent or not self._heard:
            return
        with contextlib.suppress(OSError):  # no answer is no sign of life
            fcntl.ioctl(self._connection, termios.TIOCOUTQ, left)
            if not left[0]:
                self.last_sign_at = time.monotonic()

    def send(self, message: Mapping[str, Any]) -> None:
        if len(self._unsent) < MOST_UNSENT:
            self._unsent += json.dumps(message).encode() + b"\n"
        self._push()

    def _push(self) -> None:
        while self._unsent and not self.closed:
            try:
                sent = self._connection.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                self.closed = True
                return
            self._unsent = self._unsent[sent:]

    def receive(self) -> list[Any]:
        """All messages that have arrived."""
        self._push()
        while not self.closed and len(self._received) <= LONGEST:
            try:
                more = self._connection.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError:
                more = b""
            if not more:
                self.closed = True
                break
            self.last_sign_at, self._heard = time.monotonic(), True
            self._received += more
        *lines, self._received = self._received.split(b"\n")
        self.closed |= len(self._received) > LONGEST
        try:
            return [self._read(json.loads(line)) for line in lines]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.closed = True
            return []

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.last_sign_at

    @property
    def gone(self) -> bool:
        """Its kernel has closed the connection, and no monitor has connected again."""
        return self.closed and self.silent_s > RETURN_S

    def unseen(self) -> dict[str, Any]:
        """Fields for the observations of the node's ranks; none while its monitor reports."""
        if not self.gone and self.silent_s <= SILENT_S:
            return {}
        return {"silent_node_s": self.silent_s, "monitor_ended": self.gone}

    def close(self) -> None:
        self._connection.close()


class Head:
    """The head's side: the connections to all other nodes, and the last report of each."""

    def __init__(self, listener: int, token: str) -> None:
        self._listener = socket.socket(fileno=listener)
        self._listener.setblocking(False)
        self._token = token.encode()
        self._strangers: list[tuple[socket.socket, float]] = []
        self.connections: dict[str, MonitorConnection] = {}
        self.reports: dict[str, Report] = {}

    def exchange(self) -> None:
        """Accept new nodes, read reports, send a sign of life."""
        self._accept()
        for node, connection in self.connections.items():
            connection.check_acknowledged()
            for report in connection.receive():
                self.reports[node] = report
            if not connection.closed:
                connection.send({"alive": True})

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
                if node in self.connections:  # its monitor was started again
                    self.connections[node].close()
                self.connections[node] = MonitorConnection(connection, read_report, heard=True)
            else:
                connection.close()
        self._strangers = waiting[-STRANGERS:]
        for connection, _ in waiting[:-STRANGERS]:
            connection.close()

    def _node_of(self, connection: socket.socket) -> str | None:
        """Of a greeting; empty for what is none, None while it may still come."""
        try:
            said = connection.recv(GREETING, socket.MSG_PEEK)
        except BlockingIOError:
            return None
        except OSError:
            return ""
        line, end, _ = said.partition(b"\n")
        token, _, node = line.partition(b" ")
        if end and hmac.compare_digest(token, self._token):
            connection.recv(len(line) + 1)
            return node.decode()
        return None if said and not end and len(said) < GREETING else ""

    def broadcast(self, **message: Any) -> None:
        for connection in self.connections.values():
            connection.send(message)

    def wait_for_answers(self, deadline: float) -> None:
        """Wait until every node in reach has sent the report that follows the request to its responders."""
        near = {
            node: connection
            for node, connection in self.connections.items()
            if node in self.reports and connection.silent_s <= SILENT_S and not connection.closed
        }
        while near and time.monotonic() < deadline:
            time.sleep(0.02)
            for node, connection in list(near.items()):
                for report in connection.receive():
                    if node in near:  # none follows with less
                        self.reports[node] = report
                    if report.asked:
                        near.pop(node, None)

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()
        for stranger, _ in self._strangers:
            stranger.close()
        self._listener.close()


class Peer:
    """The side of every other node. `connection` is None until the head has been reached."""

    def __init__(self, head: tuple[str, int], token: str, node: str) -> None:
        self._head, self._greeting = head, f"{token} {node}\n".encode(errors="backslashreplace")
        self.connection: MonitorConnection | None = None
        self.tried_at = 0.0

    def exchange(self, report: Report) -> list[dict[str, Any]]:
        """Send the report; returns the head's messages."""
        if self.connection is None or self.connection.closed:
            self._connect()
        if self.connection is None:
            return []
        self.connection.check_acknowledged()
        self.connection.send(report.encoded())
        orders: list[dict[str, Any]] = self.connection.receive()
        return orders

    def _connect(self) -> None:
        now = time.monotonic()
        if now - self.tried_at < RETRY_S:
            return
        self.tried_at = now
        with contextlib.suppress(OSError):  # not yet, or gone
            connection = socket.create_connection(self._head, CONNECT_S)
            self.close()
            self.connection = MonitorConnection(connection, read_order, greeting=self._greeting)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
