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
    assert said["a"] == ("127.0.0.1\n", "", 0)


def test_a_node_that_does_not_come_is_named_within_the_time(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one process: of two that a busy machine starts a second apart, b would not come either."""
    meeting = rendezvous.Meeting(
        hosts=["127.0.0.1"], port=port, token="t", nodes=["a", "b", "c"], timeout_s=1
    )

    async def a_and_b() -> list[int]:
        return await asyncio.gather(*(rendezvous.meet(meeting, name, 0, 0) for name in "ab"))

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


def test_a_stranger_that_says_nothing_or_nonsense_disturbs_nobody(port: int) -> None:
    head = subprocess.Popen(
        [
            *COMMAND,
            "meet",
            "--nodes",
            "a,b",
            "--node",
            "a",
            "--hosts",
            "127.0.0.1",
            "--port",
            str(port),
            "--token",
            "t",
        ],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    strangers = [_connect(port), _connect(port), _connect(port)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    strangers[1].sendall(b'{"token": "t", "node": ["b"]}\n')
    assert meet("b", port, "127.0.0.1", {"nodes": "a,b"})["b"][2] == 0
    assert head.communicate(timeout=30)[0] == "127.0.0.1\n"
    for stranger in strangers:
        stranger.close()


def _connect(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=10)
        except ConnectionRefusedError:
            continue


def test_too_few_gpus_on_one_node_are_counted_before_training(port: int) -> None:
    said = meet("ab", port, "127.0.0.1", {"a": "--gpus 4 --ranks 4", "b": "--gpus 2 --ranks 4"})
    assert "2 nodes × 4 ranks need 4 GPUs a node, but b has 2. HINT: NPROC_PER_NODE=2" in said["a"][1]
    assert said["a"][2] == 1


def test_gpus_that_stay_unused_where_nodes_have_different_numbers_are_named(port: int) -> None:
    said = meet("ab", port, "127.0.0.1", {"a": "--gpus 4 --ranks 4", "b": "--gpus 8 --ranks 4"})
    assert said["a"][::2] == ("127.0.0.1\n", 0)
    assert said["a"][1] == (
        "4 ranks a node, but b has 8 GPUs: the others are unused. HINT: nodes of one kind, as by sbatch "
        "--constraint\n"
    )
    said = meet("ab", port, "127.0.0.1", {"a": "--gpus 8 --ranks 4", "b": "--gpus 8 --ranks 4"})
    assert said["a"] == ("127.0.0.1\n", "", 0)


def test_a_taken_port_is_passed_over() -> None:
    with socket.create_server(("", 0)):
        first = rendezvous.free_port(seed=1)
        with socket.create_server(("", first)):
            assert rendezvous.free_port(seed=1) != first


def test_here_names_the_interface_on_the_way() -> None:
    out = subprocess.run(
        [*COMMAND, "here", "--towards", "127.0.0.1"], cwd=REPOSITORY, capture_output=True, text=True
    ).stdout
    assert re.fullmatch(r"127\.0\.0\.1 lo\n", out)


def test_the_ranks_get_the_heads_address_as_another_node_sees_it() -> None:
    """Debian maps a host's own name to 127.0.1.1, which other nodes cannot reach."""
    meeting = rendezvous.Meeting(hosts=["n1"], port=1, token="t", nodes=["n1", "n2"], timeout_s=1)
    arrivals = rendezvous.Arrivals(meeting)
    arrivals.enter({"host": "n1", "node": "n1", "gpus": 0}, "127.0.1.1")
    assert arrivals.address() is None
    arrivals.enter({"host": "n1", "node": "n2", "gpus": 0}, "10.0.0.1")
    assert arrivals.address() == "10.0.0.1"


def test_a_single_node_gets_its_own_address() -> None:
    meeting = rendezvous.Meeting(hosts=["n1"], port=1, token="t", nodes=["n1"], timeout_s=1)
    arrivals = rendezvous.Arrivals(meeting)
    arrivals.enter({"host": "n1", "node": "n1", "gpus": 0}, "127.0.1.1")
    assert arrivals.address() == "127.0.1.1"
