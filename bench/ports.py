"""A port where the ranks of one start meet, kept for them: no other process is given it between its choice
and their listening.

The socket that keeps it is bound and does not listen, so the ranks' store may (both say SO_REUSEADDR), while
a process that asks for any free port gets another. Kept until this process ends.
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
