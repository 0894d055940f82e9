"""What a rank's responder answers about its threads, and that it answers whatever they do."""

from __future__ import annotations

import hashlib
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fsdp.watch import rank as watch_rank
from fsdp.watch.rank import Responder
from tests.support.processes import eventually

OVER = threading.Event()


def counts() -> None:
    number = 0
    while not OVER.is_set():
        number += 1


def sums() -> None:
    sum(1 for _ in itertools.takewhile(lambda _: not OVER.is_set(), itertools.count()))


def waits() -> None:
    OVER.wait()


def spins_in_c() -> None:
    while not OVER.is_set():
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)


@contextmanager
def training_in(does: Callable[[], None]) -> Iterator[Responder]:
    """The responder of a training thread that is in `does`."""
    made: list[Responder] = []

    def train() -> None:
        made.append(Responder(torch.device("cpu")))
        does()

    OVER.clear()
    thread = threading.Thread(target=train)
    thread.start()
    try:
        eventually("it is there", lambda: made, 20)
        yield made[0]
    finally:
        OVER.set()
        thread.join()
        made[0].close()


def answer(responder: Responder, command: str = "stacks") -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(responder.address)
        connection.sendall(command.encode())
        return dict(json.loads(connection.makefile().readline()))


def stands_in(made: Responder, name: str) -> bool:
    return any(frame[2] == name for frame in answer(made)["stack"])


@pytest.mark.parametrize(
    ("does", "in_python"), [(counts, True), (sums, True), (waits, False), (spins_in_c, False)]
)
def test_a_loop_of_python_is_told_from_a_wait_in_c(does: Callable[[], None], in_python: bool) -> None:
    """Though a short loop is always interrupted at the same instruction."""
    with training_in(does) as made:
        eventually("it is in its function", lambda: stands_in(made, does.__name__), 20)
        assert {answer(made)["moving"] for _ in range(5)} == {in_python}


def test_a_flight_recorder_that_cannot_be_read_hides_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_rank, "flight_recorder_entries", lambda: [{"of": "another form"}])
    with training_in(waits) as made:
        found = answer(made)
        assert found["calls"] == []
        assert any(frame[2] == "waits" for frame in found["stack"])
