"""The monitors of several nodes: the head's listens, the others connect and tell every beat what they see.

Words are JSON lines. Nobody waits for anybody: what cannot be sent at once is dropped, and who is not heard
of for SILENT_S is said to be out of reach, on either side of the cut. Not over the run directory: shared
storage may keep what it is told to itself for longer than that, and may be there where the ranks' own network
is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import termios
import time
from array import array
from collections.abc import Sequence
from typing import Any

SILENT_S = 3.0
CONNECT_S = 0.5


class Line:
    """One connection, both ways, never waiting."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # closed already, which the first word will find
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._coming, self._going = connection, b"", b""
        self.heard_at = time.monotonic()
        self.closed = False

    def look(self) -> None:
        """Before this beat's word: has the other kernel confirmed all the earlier ones? Then it is in reach,
        though its monitor may wait for a processor.
        """
        left = array("i", [0])
        if self.closed or self._going:
            return
        with contextlib.suppress(OSError):  # no answer is no sign of life
            fcntl.ioctl(self._connection, termios.TIOCOUTQ, left)
            if not left[0]:
                self.heard_at = time.monotonic()

    def say(self, word: dict[str, Any]) -> None:
        if not self._going or len(self._going) < 1 << 22:
            self._going += json.dumps(word).encode() + b"\n"
        self._push()

    def _push(self) -> None:
        while self._going and not self.closed:
            try:
                sent = self._connection.send(self._going)
            except BlockingIOError:
                return
            except OSError:
                self.closed = True
                return
            self._going = self._going[sent:]

    def hear(self) -> list[dict[str, Any]]:
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
            self.heard_at = time.monotonic()
            self._coming += more
        *lines, self._coming = self._coming.split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            self.closed = True  # whoever tries all ports of a host
            return []

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.heard_at

    def close(self) -> None:
        self._connection.close()


class Head:
    """On rank 0's node. What each other node said last."""

    def __init__(self, descriptor: int, token: str) -> None:
        self._ear = socket.socket(fileno=descriptor)
        self._ear.setblocking(False)
        self._token = token
        self._strangers: list[Line] = []
        self.lines: dict[str, Line] = {}
        self.said: dict[str, dict[str, Any]] = {}

    def beat(self) -> None:
        with contextlib.suppress(BlockingIOError):  # nobody else is there
            while True:
                self._strangers.append(Line(self._ear.accept()[0]))
        for line in list(self._strangers):
            word = next(iter(line.hear()), None)
            if isinstance(word, dict) and word.get("token") == self._token:
                self.lines[word["node"]], self.said[word["node"]] = line, word
                self._strangers.remove(line)
            elif word is not None or line.closed:
                line.close()
                self._strangers.remove(line)
        for node, line in self.lines.items():
            line.look()
            for word in line.hear():
                self.said[node] = word
            if not line.closed:
                line.say({"beat": True})

    def tell(self, word: dict[str, Any]) -> None:
        for line in self.lines.values():
            line.say(word)

    def wait_for_looks(self, deadline: float) -> None:
        """Until every node in reach has said what it found when it was told to look."""
        near = [node for node, line in self.lines.items() if line.silent_s <= SILENT_S and not line.closed]
        for node in near:
            self.said[node] = {**self.said[node], "asked": False}
        while time.monotonic() < deadline and not all(self.said[node]["asked"] for node in near):
            time.sleep(0.02)
            for node in near:
                for word in self.lines[node].hear():
                    if word["asked"] or not self.said[node]["asked"]:
                        self.said[node] = word

    def close(self) -> None:
        for line in (*self.lines.values(), *self._strangers):
            line.close()
        self._ear.close()


class Peer:
    """On every other node: the line to the head. `None` until it has been reached."""

    def __init__(self, addresses: Sequence[tuple[str, int]], token: str, node: str) -> None:
        self._addresses, self._token, self._node = addresses, token, node
        self.line: Line | None = None
        self.tried_at = 0.0

    def beat(self, word: dict[str, Any]) -> list[dict[str, Any]]:
        if self.line is None:
            self._connect()
        if self.line is None:
            return []
        self.line.look()
        self.line.say({"token": self._token, "node": self._node, **word})
        return self.line.hear()

    def _connect(self) -> None:
        now = time.monotonic()
        if now - self.tried_at < 1.0:
            return
        self.tried_at = now
        for address in self._addresses:
            with contextlib.suppress(OSError):  # not by this way, or not yet
                self.line = Line(socket.create_connection(address, CONNECT_S))
                return

    def close(self) -> None:
        if self.line is not None:
            self.line.close()
