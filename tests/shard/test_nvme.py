"""--memory.nvme: the same numbers to the bit, tensors in files while it trains, an empty folder after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

from fsdp.distributed.env import DistEnv
from tests.memory import small
from tests.support.marks import quick_are
from tests.support.runs import check_same_numbers, failures
from tests.support.world import run_world

HSDP = "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2"
OWN = "--model.name tests.support.user_code:"
CASES = {
    "optimizer, one process": (1, "optimizer", ""),
    "optimizer, fsdp": (2, "optimizer", ""),
    "optimizer, hsdp": (4, "optimizer", HSDP),
    "optimizer, ddp": (2, "optimizer", "--mesh.strategy ddp"),
    "optimizer, sgd": (2, "optimizer", "--optim.name sgd"),
    "optimizer, scalars and frozen parts": (3, "optimizer", f"{OWN}Scalar"),
    "all, one process": (1, "all", ""),
    "all, fsdp": (3, "all", ""),
    "all, hsdp, micro-batches": (4, "all", f"{HSDP} --train.micro_batch 1 --mesh.accumulate shard"),
    "all, recomputed, gathered once a step": (
        2, "all",
        "--memory.activation_checkpointing full --mesh.reshard_after_forward step --train.micro_batch 2",
    ),
    "all, tied": (2, "all", f"{OWN}TiedWords --data.name tests.support.user_code:sentences"),
    "all, smaller than the mesh": (4, "all", f"{OWN}Tiny"),
    "all, offloaded": (2, "all", "--memory.cpu_offload true"),
}  # fmt: skip


@pytest.mark.parametrize("case", quick_are(["all, tied"], CASES, []))
def test_the_numbers_are_those_of_a_run_in_memory(case: str, tmp_path: Path) -> None:
    ranks, what, words = CASES[case]
    in_files = f"--memory.nvme {what} --memory.nvme_dir {tmp_path / 'disk'}"
    check_same_numbers(ranks, tmp_path, words, in_files)
    assert not any((tmp_path / "disk").iterdir())


def lies_where(env: DistEnv, folder: str, everything: bool) -> dict[str, set[str]]:
    """For each kind of tensor the files in which it lies after a step; "memory" for none."""
    found = small.trained(env, Path(folder), everything=everything)
    nvme_files, optimizer = found.nvme_files, found.optimizer

    def of(tensors: list[Any]) -> set[str]:
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return {
            next((n for n, f in nvme_files._files.items() if f.holds(t)), "memory")
            for t in local
            if t.numel()
        }

    trained = [p for group in optimizer.param_groups for p in group["params"]]
    states = [value for p in trained for name, value in optimizer.state[p].items() if name != "step"]
    return {"parameters": of(trained), "gradients": of([p.grad for p in trained]), "states": of(states)}


def test_tensors_in_files(tmp_path: Path) -> None:
    for found in run_world(3, lies_where, str(tmp_path), False):
        assert found == {"parameters": {"memory"}, "gradients": {"memory"}, "states": {"states"}}
    for found in run_world(3, lies_where, str(tmp_path), True):
        assert found == {"parameters": {"parameters"}, "gradients": {"gradients"}, "states": {"states"}}


@pytest.mark.long
def test_with_all_a_unit_s_pages_are_dropped_when_it_is_done(tmp_path: Path) -> None:
    """64 MiB of parameters in sixteen units, and as much of gradients."""
    [found] = run_world(1, small.resident_with_all, str(tmp_path))
    page = 64 << 10
    assert found["start"] < page, found
    assert found["forward"] <= 2 * found["unit"] + page, found
    assert found["backward"] <= 4 * found["unit"] + page, found
    assert found["after backward"] <= found["unit"] + page, found  # the first unit's: nothing follows it
    assert found["after the update"] < page, found


def test_a_full_disk_is_refused_before_training(tmp_path: Path) -> None:
    words = f"--memory.nvme optimizer --memory.nvme_dir {tmp_path / 'disk'} --model.args.width 2000000"
    said = failures(2, tmp_path / "run", words)
    assert len(set(said)) == 1
    assert said[0] is not None
    assert "ConfigError: --memory.nvme_dir" in said[0]
    assert "iB free on" in said[0]
    assert "HINT: --memory.nvme_dir" in said[0]
    assert not any((tmp_path / "disk").iterdir())
