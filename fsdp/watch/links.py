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
"""Bytes of the first message on a connection, its token and node."""
CONNECT_S, RETRY_S = 0.5, 1.0
MOST_UNSENT = 1 << 22
"""Bytes. With this much unsent, further messages are dropped."""
LONGEST = 1 << 26
"""Bytes of one message: a longer one is of another program, and its connection is closed."""
OUT_OF_REACH = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


class Link:
    """One connection, non-blocking. `read`: what a received message is; `longest`: bytes of one."""

    def __init__(
        self, connection: socket.socket, read: Callable[[dict[str, Any]], Any] = dict, longest: int = LONGEST
    ) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # closed already, which the first message shows
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENT_S))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self.read, self.longest = connection, read, longest
        self._received, self._unsent = bytearray(), b""
        self.began = self.heard_at = time.monotonic()
        self.closed = self._heard = self._out_of_reach = False

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
            while not self.closed and (room := self.longest + 1 - len(self._received)) > 0:
                if not (more := self._connection.recv(min(1 << 20, room))):
                    raise ConnectionError
                self.heard_at, self._heard = time.monotonic(), True
                self._received += more
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(error)
        *lines, self._received = self._received.split(b"\n")
        try:
            messages = [self.read(json.loads(line)) for line in lines]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            messages, self.closed = [], True
        self.closed |= len(self._received) > self.longest
        return messages

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


def _observations(report: Mapping[str, Any]) -> list[Observation]:
    return [decode(data) for data in report["ranks"]]


class Head:
    """The head's side: the connections to all other nodes, and the last report of each."""

    def __init__(self, listener: int, token: str) -> None:
        self._listener = socket.socket(fileno=listener)
        self._listener.setblocking(False)
        self._token = token.encode()
        self._strangers: list[Link] = []
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
        # none waits, or it has gone again; without a free descriptor the next round, after some were closed
        with contextlib.suppress(OSError):
            for _ in range(2 * STRANGERS):
                self._strangers.append(Link(self._listener.accept()[0], longest=GREETING))
        waiting: list[Link] = []
        for link in self._strangers:
            greeting = next(iter(link.receive()), None)
            if greeting and hmac.compare_digest(str(greeting.get("token")).encode(), self._token):
                node = str(greeting.get("node"))
                if node in self.links:  # its monitor was started again
                    self.links[node].close()
                link.read, link.longest = _observations, LONGEST
                self.links[node] = link
            elif link.closed or greeting is not None or time.monotonic() - link.began > STRANGER_S:
                link.close()
            else:
                waiting.append(link)
        self._strangers = waiting[-STRANGERS:]
        for link in waiting[:-STRANGERS]:
            link.close()

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
        self._listener.close()
        for link in (*self._strangers, *self.links.values()):
            link.close()


class Peer:
    """The side of every other node. `link` is None until the head has been reached."""

    def __init__(self, head: tuple[str, int], token: str, node: str) -> None:
        self._head, self._greeting = head, {"token": token, "node": node}
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
                self.link = Link(connection)
                self.link.send(self._greeting)
        if self.link is None:
            return []
        self.link.send({"ranks": ranks})
        orders: list[dict[str, Any]] = self.link.receive()
        return orders

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
