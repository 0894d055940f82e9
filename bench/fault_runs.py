"""Starts, observes and ends the ranks of a run, with or without an injected fault. Ranks are forked from the
bench.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.fault_kinds import Kind, Where

RANKS = 4
PATIENCE_S = 150.0
"""From the fork to the verdict: a machine with more to do takes a minute to begin."""


def import_once() -> None:
    """Imports before the ranks are forked, so that no rank has to."""
    importlib.import_module("fsdp.run.loop")
    importlib.import_module("train")


def fork_rank(
    rank: int,
    address: tuple[str, int],
    flags: Sequence[str],
    log: Path,
    kind: Kind | None,
    where: Where | None,
    enter: Sequence[int] = (),
    ranks: int = RANKS,
) -> int:
    """One rank as a child process. `enter` are the namespaces of its host."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        # PR_SET_PDEATHSIG: a bench that is ended leaves no ranks behind
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        with log.open("ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        for descriptor in enter:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
                raise OSError(ctypes.get_errno(), "setns")
        code = _be(rank, ranks, address, list(flags), kind, where)
    finally:
        os._exit(code)


def _be(
    rank: int, ranks: int, address: tuple[str, int], flags: list[str], kind: Kind | None, where: Where | None
) -> int:
    import train
    from fsdp import config as configuration

    nodes = 2 if kind is not None and kind.two_nodes else 1
    variables = {
        "RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank % (ranks // nodes),
        "LOCAL_WORLD_SIZE": ranks // nodes,
        "GROUP_RANK": rank // (ranks // nodes), "GROUP_WORLD_SIZE": nodes,
        "MASTER_ADDR": address[0], "MASTER_PORT": address[1],
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in variables.items()})
    if nodes == 2:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    if kind is not None and where is not None:
        kind.put(where, rank == where.rank)
    return train.run_here(configuration.load(flags))


def wait_for(found: Any, what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(0.02)
    raise TimeoutError(what)


def verdict_of(run: Path) -> dict[str, Any] | None:
    file = run / "watch" / "verdicts.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    # in a partition each half judges by itself; the first rank's node counts
    return next((one for one in found if one.get("by") in (socket.gethostname(), "n1")), None)


def steps_of(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def ended(pids: list[int], seconds: float) -> list[int]:
    """Exit codes, negative for a signal. Every rank must have ended by itself."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(codes) < len(pids) and time.monotonic() < deadline:
        for pid in [pid for pid in pids if pid not in codes]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    found = [codes[pid] for pid in pids if pid in codes]
    pids[:] = [pid for pid in pids if pid not in codes]
    return found


def end_all(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
