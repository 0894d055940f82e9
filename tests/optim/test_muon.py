"""--optim.name muon: the numbers of torch.optim.Muon beside AdamW on the whole model, on any mesh."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp.base.errors import ConfigError
from fsdp.config import OptimSection
from fsdp.dist.env import DistEnv
from fsdp.optim.muon import hidden_matrices, rounds
from fsdp.optim.optimizer import build_optimizer
from tests.support.plain_loop import Trained, relative_difference, train_plainly
from tests.support.runs import failures, run, settings
from tests.support.user_code import TiedWords, Tiny, Uneven
from tests.support.world import run_world

MUON = "--optim.name muon --precision.master fp64 --precision.param fp64 --train.steps 6"
UNEVEN = [f"blocks.{at}.{part}.weight" for at in range(3) for part in ("up", "down")]


@functools.cache
def plain() -> Trained:
    return train_plainly(settings(MUON), dtype="fp64", steps=6)


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, ""),
        (4, "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2"),
        pytest.param(1, "", marks=pytest.mark.long),
        pytest.param(3, "", marks=pytest.mark.long),
        pytest.param(2, "--mesh.strategy ddp", marks=pytest.mark.long),
        pytest.param(3, "--train.micro_batch 1 --mesh.wrap root", marks=pytest.mark.long),
        pytest.param(
            2,
            "--memory.activation_checkpointing full --memory.activation_checkpointing_every 2",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_run_updates_as_torch_s_muon_on_one_process(ranks: int, more: str, tmp_path: Path) -> None:
    finished = run(ranks, tmp_path, MUON, more)
    assert relative_difference(finished.parameters, plain().parameters) <= 1e-12


def test_a_run_resumes_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    assert failures(2, tmp_path, MUON, "--train.stop_after 2") == [None] * 2
    assert failures(1, tmp_path, MUON, "--train.stop_after 4") == [None]
    finished = run(3, tmp_path, MUON)
    assert relative_difference(finished.parameters, plain().parameters) <= 1e-12


# ---------------------------------------------------------------- its exchange, to the bit

SHAPES = [(7, 5), (4, 9), (1, 6), (8, 8), (5, 7), (2, 3), (12, 2)]


def drawn(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


class Body(nn.Module):
    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([nn.Parameter(tensor) for tensor in tensors])


def steps_on_a_mesh(env: DistEnv, shape: tuple[int, ...], owned: int) -> list[list[Tensor]]:
    """Three updates from gradients that are given; the last matrix has none. The whole matrices and this
    rank's momentum, whole.
    """
    mesh = init_device_mesh("cpu", shape) if shape else None
    placements = [*[Replicate()] * (len(shape) - 1), Shard(0)]

    def placed(tensors: list[Tensor]) -> list[Tensor]:
        return [distribute_tensor(t, mesh, placements) for t in tensors] if mesh is not None else tensors

    model = Body(placed(drawn(0)))
    section = OptimSection(name="muon", muon_parameters="*", lr=0.1)
    optimizer: Any = build_optimizer(section, model)
    optimizer._rounds = rounds(optimizer._shapes, env.world_size, owned)
    for seed in (1, 2, 3):
        for parameter, grad in zip(list(model.parameters())[:-1], placed(drawn(seed)), strict=False):
            parameter.grad = grad
        optimizer.step()
    momentum = [optimizer.state[p]["momentum_buffer"] for p in model.parameters() if p.grad is not None]
    return [[_whole(one) for one in some] for some in (model.parameters(), momentum)]


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


@pytest.mark.parametrize(
    ("ranks", "shape", "owned"),
    [(1, (), 1 << 20), (3, (3,), 1 << 20), (3, (3,), 20), (3, (), 20), (4, (2, 2), 1 << 20), (4, (2, 2), 30)],
)
def test_every_rank_has_torch_s_bits(ranks: int, shape: tuple[int, ...], owned: int) -> None:
    expected = [nn.Parameter(tensor) for tensor in drawn(0)]
    plainly = torch.optim.Muon(expected, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for seed in (1, 2, 3):
        for parameter, grad in zip(expected[:-1], drawn(seed), strict=False):
            parameter.grad = grad
        plainly.step()
    momentum = [plainly.state[parameter]["momentum_buffer"] for parameter in expected[:-1]]
    for matrices, moments in run_world(ranks, steps_on_a_mesh, shape, owned):
        assert all(torch.equal(a, b) for a, b in zip(matrices, expected, strict=True))
        # of every matrix, also of those that another replica orthogonalizes: any replica may save it
        assert all(torch.equal(a, b) for a, b in zip(moments, momentum, strict=True))


# ---------------------------------------------------------------- which parameters


def names_of(model: nn.Module, wanted: str = "") -> list[str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for parameter in hidden_matrices(model, wanted)]


def test_matrices_inside_repeated_blocks() -> None:
    assert names_of(Uneven()) == UNEVEN
    assert not any("words" in name for name in names_of(TiedWords()))
    layers = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3)
    )
    assert names_of(layers) == ["2.weight", "4.weight"]


def test_patterns_replace_the_rule() -> None:
    assert names_of(Uneven(), "head.weight,blocks.0.*p.weight") == ["blocks.0.up.weight", "head.weight"]


@pytest.mark.parametrize(
    ("model", "wanted", "message"),
    [
        (
            Tiny,
            "",
            "--optim.name muon finds no matrix inside repeated blocks of this model. HINT: --optim.",
        ),
        (Uneven, "blocks.0.norm.*", "blocks.0.norm.* matches no trained matrix of this model"),
        (
            Uneven,
            "heads",
            "heads matches no trained matrix of this model (of 8). HINT: --optim.muon_parameters head.weight",
        ),
    ],
)
def test_a_model_or_pattern_without_matrices_is_one_line(
    model: type[nn.Module], wanted: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        hidden_matrices(model(), wanted)
