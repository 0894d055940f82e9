"""The store in which ranks meet."""

from __future__ import annotations

import gc
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from fsdp.base.errors import LaunchError
from fsdp.distributed import process_group
from fsdp.distributed.env import DistEnv
from tests.support.env import env_of
from tests.support.world import run_world

TIMEOUT = timedelta(seconds=30)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The store of torchrun's agent, which serves it to all of its tries."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in {**variables, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    return store


def stores_of(ranks: int, nodes: int) -> list[dist.Store]:
    """Each rank's store of one try, the highest rank first in time."""
    with ThreadPoolExecutor(ranks) as pool:
        made = [
            pool.submit(process_group._default_store, env_of(rank, ranks, nodes=nodes), TIMEOUT)
            for rank in reversed(range(ranks))
        ]
        return [one.result(60) for one in reversed(made)]


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_that_torchrun_starts_again_read_nothing_of_the_try_before(
    agent: dist.TCPStore, nodes: int
) -> None:
    """A rank that read a dead rank's address there failed to connect, and so did the next tries. Agents of
    several nodes count restarts differently, and none for a node that joins: the count is no name of a try.
    """
    for ranks in (2, 4, 2):
        stores = stores_of(ranks, nodes)
        assert not any(store.check(["address of rank 0"]) for store in stores)
        stores[0].set("address of rank 0", f"of a try with {ranks}")
        for store in stores:
            assert store.get("address of rank 0") == f"of a try with {ranks}".encode()


def test_a_rank_that_does_not_come_again_is_named(agent: dist.TCPStore) -> None:
    """In the store is what it wrote in the try before."""
    stores_of(3, 1)
    with pytest.raises(LaunchError, match=r"ranks 1, 2 did not meet rank 0 within 0\.1 s\. HINT: "):
        process_group._default_store(env_of(0, 3), timedelta(seconds=0.1))


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (
            1,
            r"rank 1 on \S+ cannot reach localhost:{port} \(.*\)\. HINT: check there that localhost resolves",
        ),
        (0, r"rank 0 on \S+ cannot listen at port {port}: it is in use\. HINT: export another MASTER_ADDR"),
    ],
)
def test_an_address_that_no_rank_can_use_is_an_error_in_a_line(
    rank: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a pod whose master is not up, and for two runs with one MASTER_PORT on one machine."""
    with socket.create_server(("", 0)) as taken:
        if rank:
            taken.shutdown(socket.SHUT_RDWR)  # refuses connections, and keeps the port
        port = taken.getsockname()[1]
        for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(LaunchError, match=said.replace("{port}", str(port))) as raised:
            process_group._default_store(env_of(rank, 2), timedelta(seconds=1))
    assert raised.value.scope == "rank"


def test_a_rank_that_waits_for_its_address_says_so_before_the_time_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch tries again in silence for --run.process_group_timeout_s, a wrong name too."""
    monkeypatch.setattr(process_group, "WAITING_S", 0.1)
    with socket.create_server(("", 0)) as taken:
        taken.shutdown(socket.SHUT_RDWR)  # refuses connections, and keeps the port
        port = taken.getsockname()[1]
        for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(LaunchError):
            process_group._default_store(env_of(1, 2), timedelta(seconds=1))
    (line,) = [record.getMessage() for record in caplog.records if "tries again" in record.getMessage()]
    assert f" cannot reach localhost:{port}, where rank 0 listens, for 0.1 s (connection refused)" in line


def ends_with_groups(env: DistEnv, folder: str) -> tuple[int, int]:
    """How many groups are held after the block, and after the modules are freed."""
    dist.destroy_process_group()
    with process_group.process_group(env, 60.0, dist.FileStore(f"{folder}/inner", env.world_size)):
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
        # torch has no barrier after it: a rank that ends at once closes what its peer still waits to have
        dist.barrier(dist.new_group([0, 1]))
    held = len(process_group._ended)
    del model
    gc.collect()
    process_group.free_ended_groups()
    return held, len(process_group._ended)


def test_groups_outlive_the_modules_that_used_them(tmp_path: Path) -> None:
    """DDP's reducer that frees its group hangs where gloo's thread waits for Python's lock."""
    assert run_world(2, ends_with_groups, str(tmp_path)) == [(2, 0)] * 2
