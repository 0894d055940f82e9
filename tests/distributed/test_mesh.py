"""From a strategy and a number of ranks to two sizes, from a global batch to micro-batches: or the equation
of why not. From a rank to its place on each axis.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp.base.errors import ConfigError
from fsdp.base.torch_private import init_fake_group
from fsdp.config import MeshSection, TrainSection
from fsdp.distributed.env import DistEnv
from fsdp.distributed.mesh import (
    BatchPlan,
    DataRank,
    MeshSizes,
    RankPlace,
    build_mesh,
    mesh_views,
    place_of,
    plan_batch,
    resolve,
)
from tests.support.runs import on_a_rank
from tests.support.world import run_world


@pytest.mark.parametrize(
    ("flags", "ranks", "nodes", "expected"),
    [
        ({}, 1, 1, ("fsdp", 1, 1)),
        ({}, 4, 1, ("fsdp", 1, 4)),
        ({}, 8, 2, ("hsdp", 2, 4)),
        ({}, 4, 4, ("fsdp", 1, 4)),
        ({"shard": 8}, 8, 2, ("fsdp", 1, 8)),
        ({"replicate": 2}, 8, 1, ("hsdp", 2, 4)),
        ({"strategy": "fsdp"}, 8, 2, ("fsdp", 1, 8)),
        ({"strategy": "hsdp"}, 4, 1, ("hsdp", 2, 2)),
        ({"strategy": "hsdp"}, 3, 1, ("hsdp", 1, 3)),
        ({"strategy": "hsdp"}, 12, 3, ("hsdp", 3, 4)),
        ({"strategy": "hsdp", "shard": 2}, 8, 1, ("hsdp", 4, 2)),
        ({"strategy": "hsdp", "replicate": 4}, 8, 2, ("hsdp", 4, 2)),
        ({"strategy": "ddp"}, 3, 1, ("ddp", 3, 1)),
        ({"strategy": "ddp"}, 1, 1, ("ddp", 1, 1)),
        ({"context": 2}, 4, 1, ("fsdp", 1, 2, 2)),
        ({"tensor": 4, "context": 2}, 32, 4, ("fsdp", 1, 4, 2, 4)),
        ({"tensor": 4}, 8, 4, ("fsdp", 1, 2, 1, 4)),
        ({"expert": 4, "replicate": 2}, 8, 1, ("hsdp", 2, 4, 1, 1, 4)),
        ({"expert": 4, "tensor": 2}, 4, 1, ("fsdp", 1, 2, 1, 2, 4)),
    ],
)
def test_sizes(flags: dict[str, object], ranks: int, nodes: int, expected: tuple[object, ...]) -> None:
    assert resolve(MeshSection(**flags), ranks, nodes) == MeshSizes(*expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        ({"strategy": "hsdp", "replicate": 2, "shard": 4}, 6, "replicate 2 × shard 4 = 8 ranks, but 6 "),
        ({"strategy": "fsdp", "shard": 4}, 2, "replicate 1 × shard 4 = 4 ranks, but 2 were started. HINT: "),
        ({"strategy": "ddp", "replicate": 4}, 2, "replicate 4 × shard 1 = 4 ranks, but 2 were started."),
        ({"shard": 2}, 4, "replicate 1 × shard 2 = 2 ranks, but 4 were started. HINT: "),
        (
            {"tensor": 2, "context": 2, "replicate": 2},
            4,
            "replicate 2 × shard 1 × context 2 × tensor 2 = 8 ranks, but 4 were started. HINT: ",
        ),
        ({"tensor": 3}, 4, "replicate 1 × shard 1 × tensor 3 = 3 ranks, but 4 were started. HINT: "),
        (
            {"expert": 3},
            4,
            "--mesh.expert 3 does not divide the 4 ranks of a copy of the weights "
            "(replicate 1 × shard 4 = 4 ranks, expert 3 within a copy)",
        ),
        ({"expert": 2, "tensor": 4}, 4, "--mesh.expert 2 does not divide the 4 ranks of a copy"),
        ({"reshard_after_forward": "3"}, 4, "--mesh.reshard_after_forward 3 does not divide shard 4. HINT: "),
    ],
)
def test_what_does_not_fit_and_what_would(flags: dict[str, object], ranks: int, message: str) -> None:
    section = MeshSection(**flags)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        resolve(section, ranks)
    assert str(caught.value).startswith(message)
    hint = str(caught.value).partition("HINT: ")[2].partition(",")[0].split()
    mended = {name.removeprefix("--mesh."): value for name, value in zip(hint[::2], hint[1::2], strict=True)}
    typed = {name: value if name == "reshard_after_forward" else int(value) for name, value in mended.items()}
    assert resolve(MeshSection(**{**flags, **typed}), ranks).ranks == ranks  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("train", "ranks", "expected"),
    [
        ({"global_batch": 64}, 2, (64, 32, 1)),
        ({"global_batch": 64, "micro_batch": 8}, 2, (64, 8, 4)),
        ({"global_batch": 11}, 4, (11, 3, 1)),
        ({"global_batch": 13, "micro_batch": 2}, 3, (13, 2, 3)),
        ({"global_batch": 2}, 4, (2, 1, 1)),
    ],
)
def test_a_global_batch_becomes_micro_batches(
    train: dict[str, int], ranks: int, expected: tuple[int, ...]
) -> None:
    plan = plan_batch(TrainSection(**train), ranks)  # type: ignore[arg-type]
    assert plan == BatchPlan(*expected)
    assert plan.micro_batch * plan.accumulation * ranks >= plan.global_batch


def test_a_micro_batch_over_a_rank_s_share() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_batch(TrainSection(global_batch=10, micro_batch=8), 2)
    assert str(caught.value) == (
        "--train.micro_batch 8 is more than a rank's share: --train.global_batch 10 over 2 ranks is 5. "
        "HINT: --train.micro_batch 5"
    )


ALL_AXES = MeshSizes("hsdp", 2, 2, context=2, tensor=2, expert=4)
OF_RANK_5 = {
    "weights": {"dp_replicate": [5, 13], "dp_shard": [1, 3, 5, 7], "tensor": [4, 5]},
    "experts": {"dp_replicate": [5, 13], "expert_shard": [1, 5], "expert": [4, 5, 6, 7]},
    "copy": {"dp_replicate": [5, 13], "copy": [0, 1, 2, 3, 4, 5, 6, 7]},
    "context": {"data": [1, 5, 9, 13], "context": [5, 7], "tensor": [4, 5]},
}


def test_a_rank_has_a_place_on_each_axis_and_a_group_in_each_view() -> None:
    """As sizes alone, and as the groups of meshes of 16 ranks."""
    parts = [(data, context, tensor) for data in range(4) for context in range(2) for tensor in range(2)]
    places = [RankPlace(DataRank(data, 4), context, tensor) for data, context, tensor in parts]
    assert [place_of(ALL_AXES, rank) for rank in range(16)] == places
    assert mesh_views(MeshSizes("hsdp", 2, 3)) == {"weights": {"dp_replicate": 2, "dp_shard": 3}}
    groups: dict[str, dict[str, list[int]]] = {}
    init_fake_group(5, ALL_AXES.ranks)
    try:
        for view, axes in mesh_views(ALL_AXES).items():
            mesh = build_mesh(ALL_AXES, torch.device("cpu"), view=view)
            groups[view] = {axis: dist.get_process_group_ranks(mesh.get_group(axis)) for axis in axes}
    finally:
        dist.destroy_process_group()
    assert groups == OF_RANK_5


def warnings_of(env: DistEnv, words: list[str]) -> list[str]:
    """Of a run whose ranks are a node each."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp.run.build").addHandler(handler)
    try:
        assert on_a_rank(replace(env, local_rank=0, local_world_size=1, num_nodes=2), words) is None
    finally:
        logging.getLogger("fsdp.run.build").removeHandler(handler)
    return said


def test_an_axis_beyond_a_node_is_warned_of_once(tmp_path: Path) -> None:
    words = ["--config", "recipes/text.toml", "--train.steps", "1", "--train.eval_samples", "8"]
    words += ["--watch.enabled", "false", "--run.dir", str(tmp_path / "run"), "--mesh.tensor", "2"]
    first, second = run_world(2, warnings_of, words)
    assert [line for line in first if "beyond the 1 ranks of a node" in line] == [
        "replicate 1 × shard 1 × tensor 2 = 2 ranks: context × tensor goes beyond the 1 ranks of a node, so "
        "that every layer waits for the network between nodes. "
        "HINT: --mesh.tensor 1 --mesh.context 1 --mesh.shard 0"
    ]
    assert second == []
