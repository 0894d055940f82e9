"""The device of a rank, and two ranks of a node with one GPU. torch.cuda is replaced by a stand-in; the store
and the ranks are real.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp.base.errors import LaunchError
from fsdp.config import StopSection
from fsdp.dist.env import DistEnv, pick_device
from fsdp.dist.mesh import MeshSizes, build_mesh
from fsdp.dist.process_group import check_devices_differ, process_group, raise_open_files_limit
from fsdp.dist.stop import Stopper
from tests.support.world import run_world

ROOT = Path(__file__).parents[2]


def open_files_limit_of_a_rank(env: DistEnv) -> tuple[int, int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
    try:
        raise_open_files_limit()
        return resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_rank_may_open_as_many_files_as_the_system_allows() -> None:
    for soft, hard in run_world(1, open_files_limit_of_a_rank):
        assert soft == hard


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


def test_a_rank_beyond_the_visible_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    StandInForCuda(monkeypatch, 2)
    with pytest.raises(
        LaunchError, match=r"local rank 2 has no device: 2 are visible .* HINT: --nproc_per_node=2"
    ):
        pick_device(2)


def test_run_device_cuda_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    StandInForCuda(monkeypatch, 0)
    with pytest.raises(
        LaunchError, match=r"--run.device cuda, but torch .* sees no GPU on .* HINT: --run.device cpu"
    ):
        pick_device(0, "cuda")


def test_run_device_cpu_hides_the_gpus_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    StandInForCuda(monkeypatch, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert str(pick_device(1, "cpu")) == "cpu"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_the_flag_as_typed() -> None:
    command = [sys.executable, "train.py", "--run.device", "cuda", "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "HINT: --run.device cpu" in done.stderr


def refusal(env: DistEnv, launcher: str, devices: list[str]) -> str:
    """The error of each rank on these devices; empty if they may train."""
    store = dist.PrefixStore("devices", dist.distributed_c10d._get_default_store())
    there = replace(env, launcher=launcher)
    try:
        check_devices_differ(there, store, devices[env.rank], timeout_s=30.0)
    except LaunchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("launcher", "devices", "ranks", "there", "hint"),
    [
        ("torchrun", ["n1 GPU-a", "n1 GPU-a"], "0, 1", "has 2 ranks and 1 GPU.", "--nproc_per_node=1"),
        (
            "srun",
            ["n1 GPU-a", "n1 GPU-b", "n1 GPU-a"],
            "0, 2",
            "has 3 ranks and 2 GPUs.",
            "--ntasks-per-node=2",
        ),
        (
            "launch.local",
            ["n1 GPU-a", "n2 GPU-b", "n2 GPU-b"],
            "1, 2",
            "has 2 ranks and 1 GPU.",
            "--ranks 1",
        ),
    ],
)
def test_two_ranks_on_one_gpu_are_refused_on_every_rank(
    launcher: str, devices: list[str], ranks: str, there: str, hint: str
) -> None:
    said = run_world(len(devices), refusal, launcher, devices)
    assert len(set(said)) == 1
    assert said[0].startswith(f"ranks {ranks} on n")
    assert there in said[0]
    assert said[0].endswith(f"HINT: {hint}")


def test_equal_numbers_on_different_hosts_are_different_gpus() -> None:
    """Drivers without UUIDs of their own number them alike on each host."""
    assert run_world(2, refusal, "torchrun", ["n1 GPU-a", "n2 GPU-a"]) == ["", ""]


def devices_set(env: DistEnv) -> list[str]:
    """The devices that a rank's process selects where somebody else (Ray, fsdp.parity) has made the process
    group.
    """
    chosen: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "set_device", lambda device: chosen.append(str(device)))
        with process_group(replace(env, device=torch.device("cuda", env.local_rank)), timeout_s=30.0):
            pass
    return chosen


def test_a_rank_selects_its_device_with_an_existing_process_group() -> None:
    assert run_world(2, devices_set) == [["cuda:0"], ["cuda:1"]]


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


def timeout_of_the_stop_group(env: DistEnv, run_dir: str) -> timedelta:
    on_gpu = replace(env, device=torch.device("cuda", env.local_rank))
    stopper = Stopper(StopSection(), on_gpu, Path(run_dir), lambda: None, timeout_s=77.0)
    stopper.close()
    assert stopper._group is not None
    backend: Any = stopper._group._get_backend(torch.device("cpu"))
    return backend.options._timeout


def test_the_process_group_timeout_reaches_the_group_that_agrees_on_stops(tmp_path: Path) -> None:
    assert run_world(2, timeout_of_the_stop_group, str(tmp_path)) == [timedelta(seconds=77)] * 2
