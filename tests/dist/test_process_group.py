"""The store in which ranks meet."""

from __future__ import annotations

import gc
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from fsdp.dist import process_group
from fsdp.dist.env import DistEnv
from tests.support.env import env_of
from tests.support.world import run_world

TIMEOUT = timedelta(seconds=30)


def test_ranks_that_torchrun_starts_again_read_nothing_of_the_try_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun's agent serves one store for all its tries. A rank that read a dead rank's address there
    failed to connect, and so did the next tries.
    """
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port), "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in {**variables, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    for restart in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        mine, other = (process_group._default_store(env_of(rank, 2), TIMEOUT) for rank in range(2))
        assert not other.check(["address of rank 0"])
        mine.set("address of rank 0", f"of try {restart}")
        assert other.get("address of rank 0") == f"of try {restart}".encode()


def test_on_several_nodes_whose_agents_count_differently_ranks_still_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port), "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in {**variables, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    stores = []
    for rank, restart in ((0, "1"), (1, "0")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        stores.append(process_group._default_store(env_of(rank, 2, nodes=2), TIMEOUT))
    stores[0].set("address of rank 0", "here")
    assert stores[1].get("address of rank 0") == b"here"


def ends_with_groups(env: DistEnv, folder: str) -> tuple[int, int]:
    """How many groups are held after the block, and after the modules are freed."""
    dist.destroy_process_group()
    with process_group.process_group(env, 60.0, dist.FileStore(f"{folder}/inner", env.world_size)):
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
        dist.new_group([0, 1])
    held = len(process_group._ended)
    del model
    gc.collect()
    process_group.free_ended_groups()
    return held, len(process_group._ended)


def test_groups_outlive_the_modules_that_used_them(tmp_path: Path) -> None:
    """DDP's reducer that frees its group hangs where gloo's thread waits for Python's lock."""
    assert run_world(2, ends_with_groups, str(tmp_path)) == [(2, 0)] * 2
