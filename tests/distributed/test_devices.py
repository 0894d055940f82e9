"""The device of a rank, and two ranks of a node with one GPU. torch.cuda is replaced by a stand-in; the store
and the ranks are real.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from fsdp.base.errors import ConfigError, LaunchError
from fsdp.distributed.env import ALLOCATOR_VARIABLES, DistEnv, pick_device, set_allocator
from fsdp.distributed.mesh import MeshSizes, build_mesh
from fsdp.distributed.process_group import (
    check_devices_differ,
)
from tests.support.world import run_world


class StandInForCuda:
    """torch.cuda of a node with this many visible GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, visible: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)


@pytest.mark.parametrize(
    ("visible", "local_rank", "device"),
    [(0, 3, "cpu"), (1, 0, "cuda:0"), (1, 3, "cuda:0"), (4, 3, "cuda:3"), (8, 0, "cuda:0")],
)
def test_a_rank_takes_the_gpu_of_its_local_rank_or_the_only_one(
    visible: int, local_rank: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    StandInForCuda(monkeypatch, visible)
    assert str(pick_device(local_rank)) == device


@pytest.mark.parametrize(
    ("launcher", "flag"),
    [("torchrun", "--nproc_per_node=2"), ("srun", "--ntasks-per-node=2"), ("launch.local", "--ranks 2")],
)
def test_a_rank_beyond_the_visible_gpus_is_refused(
    launcher: str, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    StandInForCuda(monkeypatch, 2)
    with pytest.raises(LaunchError, match=rf"local rank 2 has no device: 2 are visible .* HINT: {flag}$"):
        pick_device(2, launcher=launcher)


def test_run_device_cuda_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without CUDA is a mistake of the person, which no other start corrects."""
    StandInForCuda(monkeypatch, 0)
    said = r"--run.device cuda, but torch .* sees no GPU on .* HINT: --run.device cpu"
    for version, error in (("12.8", LaunchError), (None, ConfigError)):
        monkeypatch.setattr("torch.version.cuda", version)
        with pytest.raises(error, match=said):
            pick_device(0, "cuda")


def refusal(env: DistEnv, launcher: str, devices: list[str]) -> str:
    """The error of each rank on these devices; empty if they may train."""
    store = dist.PrefixStore("devices", dist.distributed_c10d._get_default_store())
    there = replace(env, launcher=launcher)
    try:
        check_devices_differ(there, store, devices[env.rank])
    except LaunchError as error:
        return str(error)
    return ""


def test_two_ranks_on_one_gpu_are_refused_on_every_rank() -> None:
    said = run_world(3, refusal, "srun", ["n1 GPU-a", "n1 GPU-b", "n1 GPU-a"])
    assert len(set(said)) == 1
    assert said[0].startswith("ranks 0, 2 on n")
    assert said[0].endswith("has 3 ranks and 2 GPUs. HINT: --ntasks-per-node=2")


def seconds_in_a_group_of_the_mesh(env: DistEnv, axis: str) -> float:
    """How long rank 0 waits there for a peer that never comes."""
    group = build_mesh(MeshSizes("hsdp", 2, 2), env.device, timeout_s=1.0).get_group(axis)
    began = time.monotonic()
    if env.rank == 0:
        with pytest.raises(RuntimeError, match="Timed out waiting 1000ms"):
            dist.all_reduce(torch.zeros(1), group=group)
    waited = time.monotonic() - began
    dist.barrier()
    return waited


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_the_process_group_timeout_reaches_the_groups_of_the_mesh(axis: str) -> None:
    assert run_world(4, seconds_in_a_group_of_the_mesh, axis)[0] < 60.0  # gloo's own is 30 minutes


@pytest.mark.parametrize(
    ("sizes", "device", "axes", "backends"),
    [
        (MeshSizes("hsdp", 2, 4), "cuda", ("dp_replicate", "dp_shard"), "cpu:gloo,cuda:nccl"),
        (MeshSizes("hsdp", 2, 4), "cpu", ("dp_replicate", "dp_shard"), None),
        (MeshSizes("fsdp", 1, 8), "cuda", ("dp_shard",), None),
        (MeshSizes("hsdp", 1, 8), "cuda", ("dp_shard",), None),
        (MeshSizes("ddp", 8, 1), "cuda", ("dp_replicate",), None),
        (MeshSizes("fsdp", 1, 1), "cuda", ("dp_shard",), None),
    ],
)
def test_no_group_of_the_mesh_is_split_from_the_default_group(
    sizes: MeshSizes,
    device: str,
    axes: tuple[str, ...],
    backends: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch takes the default group for an axis of all ranks, and splits it for another one whose backends
    are not named.
    """
    asked: list[Any] = []
    monkeypatch.setattr(device_mesh, "init_device_mesh", lambda *given, **more: asked.append((given, more)))
    build_mesh(sizes, torch.device(device))
    ((kind, shape), more) = asked[0]
    assert (kind, math.prod(shape), more["mesh_dim_names"]) == (device, sizes.ranks, axes)
    assert more["backend_override"] == (None if backends is None else dict.fromkeys(axes, backends))


@pytest.mark.parametrize(
    ("given", "device", "settings", "after"),
    [
        ({}, "cuda", "expandable_segments:True", "expandable_segments:True"),
        ({}, "cuda", "", None),
        ({}, "cpu", "expandable_segments:True", None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "cuda", "expandable_segments:True", None),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "cuda", "expandable_segments:True", "backend:native"),
    ],
)
def test_the_allocator_is_set_on_cuda_where_the_environment_does_not(
    given: dict[str, str], device: str, settings: str, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, given.get(name, ""))
    set_allocator(settings, torch.device(device))
    assert (os.environ["PYTORCH_ALLOC_CONF"] or None) == after
