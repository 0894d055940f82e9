"""The checks before training, on real ranks whose versions or folders differ; host names; durations."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp.base.errors import LaunchError
from fsdp.distributed import process_group
from fsdp.distributed.env import DistEnv, interface_of
from fsdp.distributed.process_group import RankFacts, check, differences
from tests.doctor.faulty_ranks import FAULTS
from tests.support.env import env_of
from tests.support.world import run_world


def checked(env: DistEnv, run: str, fault: str = "well", patience_s: float = 5.0) -> tuple[str, list[str]]:
    """Of the last rank's fault: what this rank raised, and what it logged."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    process_group.log.addHandler(handler)
    try:
        with FAULTS[fault if env.rank == env.world_size - 1 else "well"]():
            check(env, Path(run), patience_s)
        return "", said
    except LaunchError as error:
        return str(error), said
    finally:
        process_group.log.removeHandler(handler)


def on_two_nodes(env: DistEnv, run: str, blind: str) -> tuple[str, list[str]]:
    """Each rank a node; the last one's run directory is another folder, as where it is not mounted."""
    env = replace(env, num_nodes=env.world_size, node_rank=env.rank, local_rank=0, local_world_size=1)
    return checked(env, blind if blind and not env.is_main else run, patience_s=0.3)


def test_ranks_with_different_torch_versions_do_not_train(tmp_path: Path) -> None:
    for said, _ in run_world(2, checked, str(tmp_path), "another torch"):
        assert "torch is" in said
        assert "rank 1 on" in said
        assert "has 2.12.9" in said
        assert "HINT:" in said


def test_equal_ranks_log_nothing_and_leave_no_file(tmp_path: Path) -> None:
    assert run_world(2, checked, str(tmp_path)) == [("", []), ("", [])]
    assert run_world(2, on_two_nodes, str(tmp_path), "") == [("", []), ("", [])]
    assert list(tmp_path.iterdir()) == []


def test_a_node_that_does_not_see_the_run_directory_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (_, first), (_, second) = run_world(2, on_two_nodes, str(tmp_path / "run"), str(tmp_path / "elsewhere"))
    assert [socket.gethostname() in line and "is it on shared storage" in line for line in first] == [True]
    assert second == []


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("own", "towards", "back", "interface"),
    [
        ("10.0.0.7", "10.0.0.7", "", ""),
        ("127.0.1.1", "10.0.0.7", "", "eth0"),
        ("", "10.0.0.7", "", "eth0"),
        ("127.0.1.1", "127.0.0.1", "10.0.0.7", "eth0"),  # rank 0's node, as Debian names it
        ("127.0.1.1", "127.0.0.1", "127.0.0.1", ""),  # all on one machine
        ("::1", "2001:db8::7", "", "eth0"),
        ("::1", "::1", "::1", ""),
        ("127.0.1.1", "10.9.9.9", "", None),
        ("127.0.1.1", "10.8.8.8", "", None),
    ],
)
def test_gloo_gets_an_interface_where_the_host_name_is_of_no_use_to_others(
    own: str, towards: str, back: str, interface: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setenv("MASTER_ADDR", "n0")
    routes = {"n0": towards, "of the other node": back}
    monkeypatch.setattr(process_group, "resolves", lambda _: own)
    monkeypatch.setattr(process_group, "address_towards", lambda host: routes[host])
    interfaces = {"10.9.9.9": "", "10.8.8.8": "lo"}
    monkeypatch.setattr(process_group, "interface_of", lambda address: interfaces.get(address, "eth0"))
    store = dist.HashStore()
    store.set("0", "of the other node")
    env = env_of(1, 2, nodes=2, launcher="srun")
    if interface is None:
        with pytest.raises(
            LaunchError, match=r"resolves to 127\.0\.1\.1, .* HINT: export GLOO_SOCKET_IFNAME="
        ):
            process_group.set_gloo_interface(env, store)
        return
    process_group.set_gloo_interface(env, store)
    assert os.environ["GLOO_SOCKET_IFNAME"] == interface
    assert store.get("1").decode() == towards


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""


# ---------------------------------------------------------------- comparing


def fact(rank: int, **changes: object) -> RankFacts:
    known: dict[str, object] = {
        "rank": rank, "node": rank, "host": f"n{rank}", "python": "3.11", "torch": "2.13", "cuda": "13.0",
        "nccl": "2.28", "driver": "580", "device": "H100",
    }  # fmt: skip
    return RankFacts(**(known | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "fatal"), [("torch", True), ("nccl", True), ("cuda", True), ("driver", False), ("device", False)]
)
def test_a_differing_rank_is_found(name: str, fatal: bool) -> None:
    everyone = [fact(0), fact(1), fact(2, **{name: "other"})]
    (one,) = differences(everyone)
    assert one.fatal is fatal
    assert one.others == {2: "other"}
    assert "rank 2 on n2 has other" in one.describe(everyone)
