"""TCP connections between the monitors of several nodes: the head listens, the others connect and report.

The head is the monitor on rank 0's node. Messages are JSON lines. No side waits for the other: a message that
cannot be sent at once is dropped, and a node without a sign of life for SILENT_S is out of reach, on either
side. They do not go over the run directory: shared storage may delay a file for longer than that, and may
work while the ranks' own network does not.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import termios
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from fsdp.watch.messages import is_order, is_report

SILENT_S = 3.0
CONNECT_S = 0.5
RETRY_S = 1.0
MOST_UNSENT = 1 << 22
"""Bytes. With this much unsent, further messages are dropped."""
LONGEST = 1 << 26
"""Bytes of one message: a longer one is of another program, and its connection is closed."""


class MonitorConnection:
    """One connection in both directions, non-blocking. `accepts`: the form of the messages to receive."""

    def __init__(self, connection: socket.socket, accepts: Callable[[Any], bool]) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # closed already, which the first message shows
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._received, self._unsent = connection, b"", b""
        self.last_sign_at = time.monotonic()
        self.closed = False
        self.received_odd = False
        """Whether a message had another form and was left out."""
        self._accepts = accepts

    def check_acknowledged(self) -> None:
        """Call before sending: a kernel that has acknowledged all earlier bytes is in reach.

        Its monitor may be silent all the same, because it waits for a processor.
        """
        left = array("i", [0])
        if self.closed or self._unsent:
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
        """All messages that have arrived and have the form to receive."""
        self._push()
        while not self.closed:
            try:
                more = self._connection.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError:
                more = b""
            if not more:
                self.closed = True
                break
            self.last_sign_at = time.monotonic()
            self._received += more
        *lines, self._received = self._received.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            self.closed = True  # a port scanner, or another program
            return []
        self.closed |= len(self._received) > LONGEST
        accepted = [message for message in messages if self._accepts(message)]
        self.received_odd |= len(accepted) < len(messages)
        return accepted

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.last_sign_at

    def close(self) -> None:
        self._connection.close()


class Head:
    """The head's side: the connections to all other nodes, and the last report of each."""

    def __init__(self, listener: int, token: str) -> None:
        self._listener = socket.socket(fileno=listener)
        self._listener.setblocking(False)
        self._token = token
        self._unidentified: list[MonitorConnection] = []
        self.connections: dict[str, MonitorConnection] = {}
        self.reports: dict[str, dict[str, Any]] = {}

    def exchange(self) -> None:
        """Accept new nodes, read reports, send a sign of life."""
        with contextlib.suppress(BlockingIOError):  # no connection waits
            while True:
                self._unidentified.append(MonitorConnection(self._listener.accept()[0], is_report))
        for connection in list(self._unidentified):
            report = next(iter(connection.receive()), None)
            if report is not None and report.get("token") == self._token:
                self.connections[report["node"]], self.reports[report["node"]] = connection, report
                self._unidentified.remove(connection)
            elif report is not None or connection.received_odd or connection.closed:
                connection.close()
                self._unidentified.remove(connection)
        for node, connection in self.connections.items():
            connection.check_acknowledged()
            for report in connection.receive():
                self.reports[node] = report
            if not connection.closed:
                connection.send({"alive": True})

    def broadcast(self, message: dict[str, Any]) -> None:
        for connection in self.connections.values():
            connection.send(message)

    def wait_for_answers(self, deadline: float) -> None:
        """Wait until every node in reach has sent the report that follows the request to its responders."""
        near = [node for node, one in self.connections.items() if one.silent_s <= SILENT_S and not one.closed]
        for node in near:
            self.reports[node] = {**self.reports[node], "asked": False}
        while time.monotonic() < deadline and not all(self.reports[node]["asked"] for node in near):
            time.sleep(0.02)
            for node in near:
                for report in self.connections[node].receive():
                    if report["asked"] or not self.reports[node]["asked"]:
                        self.reports[node] = report

    def close(self) -> None:
        for connection in (*self.connections.values(), *self._unidentified):
            connection.close()
        self._listener.close()


class Peer:
    """The side of every other node. `connection` is None until the head has been reached."""

    def __init__(self, addresses: Sequence[tuple[str, int]], token: str, node: str) -> None:
        self._addresses, self._token, self._node = addresses, token, node
        self.connection: MonitorConnection | None = None
        self.tried_at = 0.0

    def exchange(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Send the report; returns the head's messages."""
        if self.connection is None:
            self._connect()
        if self.connection is None:
            return []
        self.connection.check_acknowledged()
        self.connection.send({"token": self._token, "node": self._node, **report})
        return self.connection.receive()

    def _connect(self) -> None:
        now = time.monotonic()
        if now - self.tried_at < RETRY_S:
            return
        self.tried_at = now
        for address in self._addresses:
            with contextlib.suppress(OSError):  # not at this address, or not yet
                self.connection = MonitorConnection(socket.create_connection(address, CONNECT_S), is_order)
                return

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
