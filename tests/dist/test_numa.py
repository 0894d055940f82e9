"""--run.numa: a rank keeps the processors of its GPU's NUMA node. /sys is a folder; affinities are real."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp.dist import numa
from fsdp.dist.env import DistEnv
from tests.support.world import run_world

GPU = "0000:dc:00.0"


def machine(folder: Path, node: str, processors: str) -> Path:
    """A /sys in which the GPU is on this node."""
    pci, system = folder / "bus/pci/devices" / GPU, folder / "devices/system/node/node1"
    for one in (pci, system):
        one.mkdir(parents=True)
    (pci / "numa_node").write_text(f"{node}\n")
    (system / "cpulist").write_text(f"{processors}\n")
    return folder


def affinity_after(env: DistEnv, sys: str, choice: Any, ranks_here: int, device: str) -> set[int]:
    before = os.sched_getaffinity(0)
    there = replace(env, device=torch.device(device), local_world_size=ranks_here)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(numa, "SYS", Path(sys))
            patch.setattr(numa, "pci_address", lambda device: GPU)
            numa.maybe_bind(choice, there)
        return os.sched_getaffinity(0)
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("choice", "ranks_here", "device", "bound"),
    [
        ("auto", 2, "cuda:0", True),
        ("auto", 1, "cuda:0", False),
        ("node", 1, "cuda:0", True),
        ("off", 2, "cuda:0", False),
        ("node", 2, "cpu", False),
    ],
)
def test_a_rank_keeps_the_processors_of_its_gpus_node(
    choice: str, ranks_here: int, device: str, bound: bool, tmp_path: Path
) -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("one processor")
    first = min(allowed)
    sys = machine(tmp_path, "1", f"{first},{max(allowed) + 1}-{max(allowed) + 4}")
    (left,) = run_world(1, affinity_after, str(sys), choice, ranks_here, device)
    assert left == ({first} if bound else allowed)


@pytest.mark.parametrize(
    ("node", "processors"), [("-1", "0"), ("1", "90000-90003"), ("1", "what"), ("7", "0")]
)
def test_processors_stay_where_the_node_is_not_known_or_not_allowed(
    node: str, processors: str, tmp_path: Path
) -> None:
    sys = machine(tmp_path, node, processors)
    (left,) = run_world(1, affinity_after, str(sys), "node", 2, "cuda:0")
    assert left == os.sched_getaffinity(0)


def test_a_list_of_processors_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(numa, "SYS", machine(tmp_path, "1", "0-3,8,10-11"))
    assert numa.processors_of(1) == {0, 1, 2, 3, 8, 10, 11}
    assert numa.node_of(GPU) == 1
