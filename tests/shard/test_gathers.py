"""When parameters are gathered: how often a step, counted at the collective, and what one rank copies."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fsdp import config as configuration
from fsdp.base.torch_private import TorchDispatchMode
from fsdp.distributed.env import DistEnv
from fsdp.distributed.mesh import MeshSizes
from fsdp.run.loop import train
from fsdp.shard import shard
from tests.support import comm_hooks
from tests.support.marks import sample_are
from tests.support.runs import flags
from tests.support.world import run_world

COUNTED = "--comm.all_gather tests.support.comm_hooks:gather"


def gathers(env: DistEnv, words: list[str]) -> int:
    comm_hooks.SEEN.clear()
    train(configuration.load(words), env)
    return len(comm_hooks.SEEN)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "a_step"),
    [
        # each unit twice a micro-batch; the last one and the root stay to their backward
        ("true", 3 * (2 * 2 + 2)),
        ("false", 3 * (3 + 1)),  # each once a micro-batch
        ("step", 3 + 1),  # each once a step, whatever the micro-batches
    ],
)
def test_gathers_of_three_micro_batches(
    policy: str, a_step: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    words = f"{COUNTED} --mesh.reshard_after_forward {policy} --train.micro_batch 2 --data.args.count 48"
    counts = []
    for steps in (2, 4):
        more = flags(words, f"--train.steps {steps} --optim.warmup_steps 0 --checkpoint.export false")
        counts.append(run_world(2, gathers, ["--run.dir", str(tmp_path_factory.mktemp("run")), *more])[0])
    assert counts[1] - counts[0] == 2 * a_step


class Launches(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nothing = len(args) > 1 and args[0] is args[1]  # a copy of a tensor to itself
        self.seen[operator.overloadpacket.__name__] += not nothing
        return operator(*args, **(kwargs or {}))


def launched(env: DistEnv, words: list[str]) -> tuple[Counter[str], list[tuple[float, float]]]:
    """Operators of a run, its losses and gradient norms."""
    with Launches() as launches:
        run = train(configuration.load(words), env).run_dir
    records = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return launches.seen, [(one["loss"], one["grad_norm"]) for one in records if "loss" in one]


def by_torch(env: DistEnv, words: list[str]) -> tuple[Counter[str], list[tuple[float, float]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "whole_groups", lambda root: [])
        return launched(env, words)


def each(ranks: int, folder: Path, words: str, *variants: str, by: Any = launched) -> list[Counter[str]]:
    """The operators of runs whose losses and norms are equal to the bit."""
    words += " --train.steps 3 --checkpoint.export false"
    given = [["--run.dir", str(folder / str(at)), *flags(words, one)] for at, one in enumerate(variants)]
    found = [run_world(ranks, launched, given[0]), *(run_world(ranks, by, one) for one in given[1:])]
    assert all(run[0][1] == found[0][0][1] != [] for run in found)
    return [run[0][0] for run in found]


@pytest.mark.parametrize(("ranks", "room", "freed"), [(1, 4001, False), (1, 3999, True), (2, 4001, True)])
def test_auto_keeps_one_rank_s_copies_of_under_a_tenth(ranks: int, room: float, freed: bool) -> None:
    sizes = MeshSizes("fsdp", 1, ranks)
    kept = shard.sharding_of(configuration.load([]), sizes, None, room).resharding(nn.Linear(10, 10, False))
    assert kept is freed


OWN = "--comm.reduce_scatter tests.support.comm_hooks:Scatter"
REPLICAS = "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 1"


@pytest.mark.parametrize(("ranks", "mesh"), [(1, ""), (2, REPLICAS)])
def test_one_rank_s_shard_is_cast_once(ranks: int, mesh: str, tmp_path: Path) -> None:
    """auto: the three blocks but the last are not cast and copied again for backward; where the run offloads
    they are.
    """
    offloads = f" --memory.nvme all --memory.nvme_dir {tmp_path}"
    policies = ("auto", "false", "true", f"auto{offloads}", f"true{offloads}")
    words = [f"--mesh.reshard_after_forward {policy}" for policy in policies]
    auto, kept, freed, *offloading = each(ranks, tmp_path, f"{mesh} --precision.param bf16", *words)
    assert auto == kept
    assert auto["copy_"] < freed["copy_"]
    assert offloading[0] == offloading[1]


@pytest.mark.parametrize("more", ["", "--train.micro_batch 2 --mesh.accumulate shard"])
@pytest.mark.parametrize(("ranks", "mesh"), [(1, ""), (2, REPLICAS)])
def test_one_rank_s_reduction_copies_nothing(ranks: int, mesh: str, more: str, tmp_path: Path) -> None:
    """Beside memory of the user's own, which FSDP copies the gradients of each of four units into."""
    own, ours = each(ranks, tmp_path, f"{mesh} {more}", OWN, "")
    reductions = own["chunk_cat"] + own["chunk_cat_mixed_dtype"]  # of torch 2.15
    assert reductions == 3 * 4 * (12 // ranks // 2 if more else 1)
    assert own["copy_"] - ours["copy_"] == reductions


STEP = "--mesh.reshard_after_forward step"


@pytest.mark.parametrize("more", sample_are([STEP], ["", "--train.micro_batch 2", STEP]))
@pytest.mark.parametrize(("ranks", "mesh"), [(1, ""), (2, REPLICAS)])
def test_one_rank_s_shards_are_cast_by_one_kernel(ranks: int, mesh: str, more: str, tmp_path: Path) -> None:
    """After the first step, in which FSDP makes the gathered parameters: two copies each before."""
    ours, theirs = each(ranks, tmp_path, f"{mesh} {more} --precision.param bf16", "", "", by=by_torch)
    kernels = ours["_foreach_copy_"] - theirs["_foreach_copy_"]
    assert kernels > 0
    assert theirs["copy_"] - ours["copy_"] > 10 * kernels
