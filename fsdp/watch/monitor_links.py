"""TCP connections between the monitors of several nodes: the head listens, the others connect and report.

The head is the monitor on rank 0's node. It listens on its address towards the other nodes alone, and until a
connection has shown the run's token reads nothing of it but a greeting. Messages are JSON lines. No side
waits for the other: a message that cannot be sent at once is dropped, and a node without a sign of life for
SILENT_S is out of reach, on either side. Messages do not go over the run directory: shared storage may delay
a file for longer than that, and may work while the ranks' own network does not.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import socket
import termios
import time
from array import array
from collections.abc import Callable
from typing import Any

from fsdp.watch.messages import is_order, is_report

SILENT_S = 3.0
RETURN_S = 2.0
"""A monitor that was killed is started again, and connects again by then; else its node's processes are gone.
Shorter than monitor.ECHO_S, after which the failures of other ranks are printed.
"""
STRANGERS, STRANGER_S = 64, 3.0
"""Connections that have not shown the token yet: how many are kept, the newest, and for how long."""
GREETING = 512
"""Bytes of the first line on a connection, TOKEN NODE."""
CONNECT_S = 0.5
RETRY_S = 1.0
MOST_UNSENT = 1 << 22
"""Bytes. With this much unsent, further messages are dropped."""
LONGEST = 1 << 26
"""Bytes of one message: a longer one is of another program, and its connection is closed."""


class MonitorConnection:
    """One connection in both directions, non-blocking. `accepts`: the form of the messages to receive.

    `heard`: the other side has sent something. `greeting`: what is sent first.
    """

    def __init__(
        self,
        connection: socket.socket,
        accepts: Callable[[Any], bool],
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
        self._accepts, self._heard = accepts, heard

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

    def send(self, message: dict[str, Any]) -> None:
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

    def receive(self) -> list[dict[str, Any]]:
        """All messages that have arrived; one of another form is left out."""
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
            return [message for message in map(json.loads, lines) if self._accepts(message)]
        except (ValueError, RecursionError):
            self.closed = True  # of another program
            return []

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.last_sign_at

    @property
    def gone(self) -> bool:
        """Its kernel has closed the connection, and no monitor has connected again."""
        return self.closed and self.silent_s > RETURN_S

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
        self.reports: dict[str, dict[str, Any]] = {}

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
                self.connections[node] = MonitorConnection(connection, is_report, heard=True)
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

    def broadcast(self, message: dict[str, Any]) -> None:
        for connection in self.connections.values():
            connection.send(message)

    def wait_for_answers(self, deadline: float) -> None:
        """Wait until every node in reach has sent the report that follows the request to its responders."""
        near = [
            node
            for node, one in self.connections.items()
            if node in self.reports and one.silent_s <= SILENT_S and not one.closed
        ]
        for node in near:
            self.reports[node] = {**self.reports[node], "asked": False}
        while time.monotonic() < deadline and not all(self.reports[node]["asked"] for node in near):
            time.sleep(0.02)
            for node in near:
                for report in self.connections[node].receive():
                    if report["asked"] or not self.reports[node]["asked"]:
                        self.reports[node] = report

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

    def exchange(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Send the report; returns the head's messages."""
        if self.connection is None or self.connection.closed:
            self._connect()
        if self.connection is None:
            return []
        self.connection.check_acknowledged()
        self.connection.send(report)
        return self.connection.receive()

    def _connect(self) -> None:
        now = time.monotonic()
        if now - self.tried_at < RETRY_S:
            return
        self.tried_at = now
        with contextlib.suppress(OSError):  # not yet, or gone
            connection = socket.create_connection(self._head, CONNECT_S)
            self.close()
            self.connection = MonitorConnection(connection, is_order, greeting=self._greeting)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
