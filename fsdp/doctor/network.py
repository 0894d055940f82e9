"""Checks that each node's name resolves, and that each node reaches the others on a free port."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from fsdp.dist.addresses import address_towards, listen, resolves

CONNECT_S = 3.0
NEIGHBOURS = 16
"""Above twice as many nodes, each node tries this many before it and after it instead of all."""


@contextlib.contextmanager
def listener() -> Iterator[int]:
    """A port that accepts connections and sends the host name, until the block ends."""
    server = listen(0, 256)
    over = threading.Event()

    def serve() -> None:
        server.settimeout(0.2)
        while not over.is_set():
            try:
                taken, _ = server.accept()
            except OSError:  # the time-out, to read `over` again
                continue
            # the other side has closed the connection and reports that itself
            with contextlib.closing(taken), contextlib.suppress(OSError):
                taken.sendall(socket.gethostname().encode())

    thread = threading.Thread(target=serve, name="doctor-port", daemon=True)
    thread.start()
    try:
        yield int(server.getsockname()[1])
    finally:
        over.set()
        thread.join()
        server.close()


def partners(node: int, nodes: int) -> list[int]:
    if nodes <= 2 * NEIGHBOURS:
        return [other for other in range(nodes) if other != node]
    around = [(node + by) % nodes for by in range(-NEIGHBOURS, NEIGHBOURS + 1) if by]
    return list(dict.fromkeys(around))


def reach(node: int, places: Mapping[int, tuple[str, int]]) -> dict[int, str]:
    """Node → why it cannot be reached from here; empty if it can. All in parallel, with one time-out."""
    found: dict[int, str] = {}

    def try_one(other: int, place: tuple[str, int]) -> None:
        try:
            with contextlib.closing(socket.create_connection(place, timeout=CONNECT_S)) as link:
                link.settimeout(CONNECT_S)
                found[other] = "" if link.recv(256) else "closed at once"
        except OSError as error:
            found[other] = str(error.strerror or error)

    threads = [
        threading.Thread(target=try_one, args=(other, places[other]), daemon=True)
        for other in partners(node, len(places))
        if other in places
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * CONNECT_S)
    return {other: found.get(other, "no answer") for other in partners(node, len(places)) if other in places}


def check(host: str, main_address: str) -> dict[str, Any]:
    return {
        "host": host,
        "host_resolves": resolves(host),
        "address": address_towards(main_address) or resolves(host),
    }
