"""The nodes' meeting before training, with nodes as processes on this machine: who cannot reach whom is said
in one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch import node as rendezvous
from tests.slurm.cluster import REPOSITORY

Process = subprocess.Popen[str]
COMMAND = [sys.executable, "-m", "launch.node"]


@pytest.fixture
def port() -> int:
    return rendezvous.free_port(seed=secrets.randbits(32))


def start(node: str, port: int, hosts: str, nodes: str, *, token: str = "t", timeout: str = "10") -> Process:
    variables = {
        "SLURMD_NODENAME": node,
        "SHARDRUN_NODES": nodes.replace(",", " "),
        "SHARDRUN_SHARED": "/tmp",
        "SHARDRUN_HOSTS": hosts,
        "MASTER_PORT": str(port),
        "SHARDRUN_TOKEN": token,
        "SHARDRUN_TIMEOUT_S": timeout,
    }
    return subprocess.Popen(
        [*COMMAND, "meet"],
        cwd=REPOSITORY,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def meet(names: str, port: int, hosts: str, **more: str) -> dict[str, tuple[str, str, int]]:
    """Each of `names` meets; what it printed and its exit status."""
    started = {name: start(name, port, hosts, ",".join(names), **more) for name in names}
    return {name: (*process.communicate(timeout=60), process.returncode) for name, process in started.items()}


def test_all_meet_and_the_head_says_where(port: int) -> None:
    said = meet("abc", port, "127.0.0.1")
    assert said == {"a": ("127.0.0.1\n", "", 0), "b": ("", "", 0), "c": ("", "", 0)}


def test_where_the_name_does_not_resolve_the_address_serves(port: int) -> None:
    said = meet("ab", port, "no-such-host.invalid,127.0.0.1")
    used = "rendezvous: b did not reach a at no-such-host.invalid: the nodes meet elsewhere\n"
    assert (said["a"], said["b"]) == (("127.0.0.1\n", "", 0), ("", used, 0))


def test_a_node_that_does_not_come_is_named_within_the_time(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one process: of two that a busy machine starts a second apart, b would not come either."""
    meeting = rendezvous.Meeting(
        hosts=["127.0.0.1"], port=port, token="t", nodes=["a", "b", "c"], timeout_s=1
    )

    async def a_and_b() -> list[int]:
        return await asyncio.gather(*(rendezvous.meet(meeting, name) for name in "ab"))

    assert asyncio.run(a_and_b()) == [1, 1]
    said = capsys.readouterr()
    assert said.err.startswith(f"rendezvous: c did not reach a at 127.0.0.1:{port} within 1 s")
    assert "HINT: set RDZV_HOST" in said.err
    assert (said.out, said.err.count("\n")) == ("failed c\n", 1), "b is not to blame"


def test_a_command_gets_the_interface_on_the_way() -> None:
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1"}
    words = [*COMMAND, "rank", "sh", "-c", "echo $GLOO_SOCKET_IFNAME"]
    assert subprocess.check_output(words, cwd=REPOSITORY, env=environ, text=True) == "lo\n"


def test_a_node_that_does_not_share_the_run_directory_is_named(
    port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts: dict[str, Any] = {
        "hosts": ["127.0.0.1"],
        "port": port,
        "token": "t",
        "nodes": ["a", "b"],
        "timeout_s": 2.0,
    }
    shared, other = (rendezvous.Meeting(**facts, shared=tmp_path / name) for name in "xy")
    (tmp_path / "x").mkdir()

    async def a_and_b() -> list[int]:
        return [*await asyncio.gather(rendezvous.meet(shared, "a"), rendezvous.meet(other, "b"))]

    assert asyncio.run(a_and_b()) == [1, 1]
    assert f"b does not see what a wrote into {tmp_path}/x. HINT: " in capsys.readouterr().err
    assert not list((tmp_path / "x").iterdir())


def test_the_preferred_address_is_used_though_another_answers_too(port: int) -> None:
    """Two networks: of 8 meetings 3 had taken the slower one."""
    said = meet("abc", port, "127.0.0.3,127.0.0.2")
    assert said["a"] == ("127.0.0.3\n", "", 0)


def test_an_address_that_one_node_did_not_reach_is_not_used() -> None:
    ways = {"b": ["fd00::1", "10.0.0.1", "10.1.0.1"], "c": ["10.0.0.1", "10.1.0.1"]}
    assert rendezvous.common_address(ways) == "10.0.0.1"
    del ways["b"][1]
    assert rendezvous.common_address(ways) == "10.1.0.1"
    del ways["c"][1]
    assert rendezvous.common_address(ways) is None


def test_a_caller_without_the_token_is_ignored(port: int) -> None:
    """A port scanner, and another job's node whose port is the same."""
    head = start("a", port, "127.0.0.1", "a,b", timeout="20")
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            foreign = socket.create_connection(("127.0.0.1", port), timeout=10)
            break
    with foreign:
        foreign.sendall(b'{"token": "u", "node": "b", "reached": ["127.0.0.9"]}\n')
        assert foreign.recv(3) == b""
    other = start("b", port, "127.0.0.1", "a,b", token="u", timeout="1")
    assert other.wait(30) == 1
    node = start("b", port, "127.0.0.1", "a,b", timeout="20")
    assert head.communicate(timeout=30)[0] == "127.0.0.1\n"
    assert node.wait(30) == 0
