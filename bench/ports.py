"""Reserves a free port for the rendezvous of a start, until the ranks listen on it.

The reserving socket is bound and does not listen, so the ranks' store can bind the port too (both set
SO_REUSEADDR), while a process that requests any free port gets another. Reserved until this process ends.
"""

from __future__ import annotations

import socket

_KEPT: list[socket.socket] = []


def free_port() -> int:
    keeper = socket.socket()
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind(("127.0.0.1", 0))
    _KEPT.append(keeper)
    return int(keeper.getsockname()[1])
