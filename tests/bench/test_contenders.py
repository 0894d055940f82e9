"""Contenders beside the plain hand-written loop, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.peers.bare import Bare
from bench.peers.base import Given, to_meta
from bench.peers.ddp import Ddp
from bench.peers.expert import Expert
from bench.peers.tutorial import Tutorial
from fsdp.dist.env import DistEnv
from tests.support.world import run_world

VOCAB, WIDTH, STEPS = 11, 6, 4


class Model(nn.Module):
    """An embedding tied to the head, and blocks; seven rows on two ranks are uneven shards."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 7), nn.GELU(), nn.Linear(7, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def trained(kind: Callable[[Given], Any], model: Model, rank: int) -> tuple[list[float], list[Tensor]]:
    """Losses of some steps, and the parameters after them."""
    contender = kind(Given(model, list(model.blocks), torch.device("cpu")))
    draw, losses = torch.Generator().manual_seed(rank), []
    for _ in range(STEPS):
        tokens = torch.randint(VOCAB, (3, 6), generator=draw)
        losses.append(float(contender.step(tokens[:, :-1], tokens[:, 1:])))
    return losses, [one.full_tensor() for one in contender.model.parameters()]


def beside_bare(env: DistEnv, kind: Callable[[Given], Any]) -> None:
    torch.manual_seed(3)
    model = Model().double()
    plain_losses, plain = trained(Bare, copy.deepcopy(model), env.rank)
    losses, parameters = trained(kind, model, env.rank)
    assert losses == pytest.approx(plain_losses, rel=1e-12, abs=0)
    for ours, theirs in zip(parameters, plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("kind", [Expert, Tutorial])
def test_a_contender_trains_as_the_bare_loop_with_a_tied_head(kind: Callable[[Given], Any]) -> None:
    run_world(2, beside_bare, kind)


def test_a_model_on_meta_keeps_its_tied_parameters() -> None:
    model = Model()
    to_meta(model)
    assert model.head.weight is model.embed.weight
    assert model.head.weight.is_meta


class Buffered(nn.Module):
    def __init__(self, stored: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("constant", torch.ones(2), persistent=stored)


def broadcasts(env: DistEnv, stored: bool) -> bool:
    model = Ddp(Given(Buffered(stored), [], torch.device("cpu"))).model
    assert isinstance(model, DistributedDataParallel)
    return bool(model.broadcast_buffers)


@pytest.mark.parametrize("stored", [False, True])
def test_ddp_broadcasts_stored_buffers_alone(stored: bool) -> None:
    assert run_world(2, broadcasts, stored) == [stored, stored]
