"""The nodes' meeting before training, with nodes as processes on this machine: who cannot reach whom is said
in one line.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping

import pytest

from launch import rendezvous
from tests.slurm.cluster import REPOSITORY

COMMAND = [sys.executable, "-m", "launch.rendezvous"]


@pytest.fixture
def port() -> int:
    return rendezvous.free_port(seed=secrets.randbits(32))


def meet(
    names: str, port: int, hosts: str, flags: Mapping[str, str] | None = None, timeout: str = "10"
) -> dict[str, tuple]:
    """Each of `names` meets; what it printed and its exit status. flags: more words for one node."""
    nodes = ",".join(dict.fromkeys(names))
    common = [
        "meet",
        "--nodes",
        flags.get("nodes", nodes) if flags else nodes,
        "--hosts",
        hosts,
        "--port",
        str(port),
    ]
    started = {
        name: subprocess.Popen(
            [
                *COMMAND,
                *common,
                "--node",
                name,
                "--token",
                "t",
                "--timeout-s",
                timeout,
                *((flags or {}).get(name, "").split()),
            ],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    }
    return {name: (*process.communicate(timeout=60), process.returncode) for name, process in started.items()}


def test_all_meet_and_the_head_says_where(port: int) -> None:
    said = meet("abc", port, "127.0.0.1")
    assert said == {"a": ("127.0.0.1\n", "", 0), "b": ("", "", 0), "c": ("", "", 0)}


def test_where_the_name_does_not_resolve_the_address_serves(port: int) -> None:
    said = meet("ab", port, "no-such-host.invalid,127.0.0.1")
    used = "rendezvous: b did not reach a at no-such-host.invalid: the nodes meet at 127.0.0.1\n"
    assert said["a"] == ("127.0.0.1\n", used, 0)


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
    assert (said.out, said.err.count("\n")) == ("", 1), "b is not to blame"


def test_a_node_says_what_it_could_not_reach_and_why(port: int) -> None:
    said = meet("b", port, "no-such-host.invalid,127.0.0.1", {"nodes": "a,b"}, timeout="1")
    reasons = f"no-such-host.invalid:{port} the name does not resolve, 127.0.0.1:{port} connection refused"
    assert said["b"] == ("", f"b cannot reach a within 1 s: {reasons}.\n", 1)


def test_another_job_on_the_same_port_is_not_met(port: int) -> None:
    """Two jobs whose ports collide: the second's nodes come to the first's head, which does not know their
    token.
    """
    said = meet("ab", port, "127.0.0.1", {"b": "--token another"}, timeout="1")
    assert "b did not reach a" in said["a"][1]
    assert said["b"][2] == 1


def _connect(port: int, host: str = "127.0.0.1") -> socket.socket:
    while True:
        try:
            return socket.create_connection((host, port), timeout=10)
        except ConnectionRefusedError:
            continue


def test_here_names_the_interface_on_the_way() -> None:
    out = subprocess.run(
        [*COMMAND, "here", "--towards", "127.0.0.1"], cwd=REPOSITORY, capture_output=True, text=True
    ).stdout
    assert re.fullmatch(r"127\.0\.0\.1 lo\n", out)


def test_a_single_node_meets_nobody(port: int) -> None:
    assert meet("a", port, "no-such-host.invalid") == {"a": ("127.0.0.1\n", "", 0)}


def test_the_preferred_address_is_used_though_another_answers_too(port: int) -> None:
    """Two networks: of 8 meetings 3 had taken the slower one."""
    said = meet("abc", port, "127.0.0.3,127.0.0.2")
    assert said["a"] == ("127.0.0.3\n", "", 0)


def test_an_address_that_one_node_did_not_reach_is_not_used() -> None:
    ways = {"b": {"fd00::1": 0, "10.0.0.1": 1, "10.1.0.1": 100}, "c": {"10.0.0.1": 1, "10.1.0.1": 100}}
    assert rendezvous.common_address(ways) == (1, "10.0.0.1")
    del ways["b"]["10.0.0.1"]
    assert rendezvous.common_address(ways) == (100, "10.1.0.1")
    del ways["c"]["10.1.0.1"]
    assert rendezvous.common_address(ways) is None


def test_a_caller_without_the_token_is_ignored(port: int) -> None:
    """A port scanner, and another job's node."""
    meeting = ["--nodes", "a,b", "--hosts", "127.0.0.1", "--port", str(port), "--token", "t"]

    def start(node: str) -> subprocess.Popen[str]:
        words = [*COMMAND, "meet", "--node", node, *meeting, "--timeout-s", "20"]
        return subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)

    head = start("a")
    with _connect(port) as foreign:
        foreign.sendall(b'{"token": "u", "node": "b", "reached": {"127.0.0.9": 0}}\n')
        assert foreign.recv(3) == b""
    node = start("b")
    assert head.communicate(timeout=30)[0] == "127.0.0.1\n"
    assert node.wait(30) == 0
