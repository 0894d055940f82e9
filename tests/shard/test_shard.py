"""Units are sharded by the flags, and nothing else about the model changes: names, modes, resting bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp.config import Config, MeshSection, PrecisionSection, SpeedSection
from fsdp.distributed.env import DistEnv
from fsdp.distributed.mesh import build_mesh, resolve
from fsdp.shard.ddp import replicate
from fsdp.shard.shard import Sharded, resolve_dtypes, shard_model, sharding_of
from tests.shard.test_materialize import made
from tests.support import user_code
from tests.support.world import run_world

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def sharded_of(env: DistEnv, name: str, section: MeshSection) -> Sharded:
    sizes = resolve(section, env.world_size)
    return shard_model(
        getattr(user_code, name)(),
        sharding_of(Config(mesh=section), sizes, env.device),
        build_mesh(sizes, env.device),
    )


def look(env: DistEnv, name: str) -> dict[str, object]:
    root = sharded_of(env, name, MeshSection()).root
    return {
        "names": [n for n, _ in root.named_parameters()],
        "rows": {n: tuple(p.to_local().shape) for n, p in root.named_parameters() if isinstance(p, DTensor)},
        "whole": [n for n, p in root.named_parameters() if not isinstance(p, DTensor)],
        "trained": {n: p.requires_grad for n, p in root.named_parameters()},
    }


def test_uneven_rows_small_parameters_and_scalars() -> None:
    found = run_world(4, look, "Tiny")
    rows = [f["rows"]["narrow.weight"] for f in found]  # type: ignore[index]
    assert rows == [(1, 12), (1, 12), (0, 12), (0, 12)]
    found = run_world(3, look, "Scalar")
    assert [f["rows"]["stem.weight"] for f in found] == [(5, 12), (5, 12), (3, 12)]  # type: ignore[index]
    assert found[0]["whole"] == ["temperature", "blocks.0.gain", "blocks.1.gain", "blocks.2.gain"]


class OwnNorm(nn.Module):
    """As transformers' RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Layer(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 32), nn.Tanh())


class Normed(nn.Sequential):
    def __init__(self) -> None:
        blocks = nn.Sequential(Layer(), Layer())
        super().__init__(blocks, OwnNorm(), nn.RMSNorm(32), nn.Linear(32, 8))


def with_own_norm(env: DistEnv, compiled: Any) -> tuple[list[str], int, list[torch.Tensor]]:
    """Compiled modules, operations of a step, output and gradients."""
    torch.manual_seed(3)
    sizes, fp64 = resolve(MeshSection(), env.world_size), PrecisionSection(master="fp64")
    config = Config(speed=SpeedSection(compile=compiled), precision=fp64)
    sharded = shard_model(Normed(), sharding_of(config, sizes, env.device), build_mesh(sizes, env.device))
    x = torch.linspace(-1, 1, 2 * 4 * 32, dtype=torch.float64).view(2, 4, 32)

    def step() -> list[torch.Tensor]:
        sharded.root.zero_grad()
        output = sharded.called(x)
        output.square().sum().backward()
        return [output.detach(), *(p.grad.full_tensor() for p in sharded.root.parameters())]  # type: ignore

    step()
    with torch.profiler.profile() as profile:
        values = step()
    names = {module: name for name, module in sharded.root.named_modules()}
    norms = sum(event.count for event in profile.key_averages() if event.key in ("aten::rsqrt", "aten::pow"))
    return [names[module] for module in sharded.compiled], norms, values


@pytest.mark.long
def test_a_norm_beside_the_blocks_is_compiled() -> None:
    """As transformers' final one, which is six kernels; torch's own is one."""
    (names, count, values), *_ = run_world(1, with_own_norm, "true", timeout_s=240)
    (_, eager, expected), *_ = run_world(1, with_own_norm, "false")
    assert names == ["0.0", "0.1", "1"]
    assert count < eager, (count, eager)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(values, expected, strict=True))


def after_evaluation(env: DistEnv, policy: str) -> tuple[bool, bool]:
    """(all parameters are shards again, the model is in training mode)"""
    sizes = resolve(MeshSection(), env.world_size)
    sharded = shard_model(
        user_code.Uneven(),
        sharding_of(Config(mesh=MeshSection(reshard_after_forward=policy)), sizes, env.device),
        build_mesh(sizes, env.device),
    )
    with sharded.evaluating():
        sharded.called(torch.zeros(2, 12))
    return all(isinstance(p, DTensor) for p in sharded.root.parameters()), sharded.root.training


@pytest.mark.parametrize("policy", ["true", "false", "step"])
def test_an_evaluation_leaves_nothing_gathered(policy: str) -> None:
    assert run_world(2, after_evaluation, policy) == [(True, True)] * 2


def reduced(env: DistEnv, copies: int, averages: bool) -> tuple[int, list[Tensor]]:
    """Each rank has one row; the loss is multiplied as a step does."""
    section = MeshSection(strategy="hsdp", replicate=copies)
    sizes = resolve(section, env.world_size)
    config = Config(mesh=section, precision=PrecisionSection(master="fp64"))
    job = replace(sharding_of(config, sizes, env.device), averages=averages)
    torch.manual_seed(0)
    sharded = shard_model(user_code.Scalar().double(), job, build_mesh(sizes, env.device))
    factor, row = sharded.averaged_over, ROWS[env.rank : env.rank + 1]
    with sharded.micro_batch(last=True):
        (sharded.called(row).square().sum() * (1 if averages else factor)).backward()
    grads = [parameter.grad for parameter in sharded.root.parameters()]
    return factor, [g.full_tensor() if isinstance(g, DTensor) else g for g in grads if g is not None]


ROWS = torch.linspace(-1, 1, 48, dtype=torch.float64).view(4, 12)


SUMS = [(1, 1, False, 1), (2, 1, False, 1), (3, 1, False, 1), (4, 2, False, 1)]
MEANS = [(2, 2, False, 2), (3, 1, True, 3)]


@pytest.mark.parametrize(("ranks", "copies", "averages", "factor"), SUMS + MEANS)
def test_gradients_are_sums_and_means_over_replicas_alone(
    ranks: int, copies: int, averages: bool, factor: int
) -> None:
    """Every parameter's, sharded or not; a loop of one's own has means."""
    torch.manual_seed(0)
    model = user_code.Scalar().double()
    (model(ROWS[:ranks]).square().sum() / (ranks if averages else 1)).backward()
    for over, found in run_world(ranks, reduced, copies, averages):
        assert over == factor
        torch.testing.assert_close(found, [p.grad for p in model.parameters()], rtol=1e-12, atol=1e-14)


def sent_each_step(env: DistEnv, name: str) -> bool:
    sharded = made(env, getattr(user_code, name), strategy="ddp")
    replicate(sharded)
    assert isinstance(sharded.runs, DistributedDataParallel)
    return bool(sharded.runs.will_sync_module_buffers())


@pytest.mark.parametrize(("name", "expected"), [("Uneven", False), ("Buffers", True), ("Waves", False)])
def test_ddp_sends_only_buffers_that_are_state(name: str, expected: bool) -> None:
    """Running statistics, not a table that the constructor fills on every rank."""
    assert run_world(2, sent_each_step, name) == [expected] * 2


def test_the_dtypes_that_a_device_gets() -> None:
    auto = resolve_dtypes(PrecisionSection(), CPU)
    assert (auto.param, auto.reduce, auto.output) == (torch.float32, torch.float32, None)
    auto = resolve_dtypes(PrecisionSection(), CUDA)
    assert (auto.master, auto.param, auto.reduce) == (torch.float32, torch.bfloat16, torch.float32)
    assert resolve_dtypes(PrecisionSection(master="fp64"), CUDA).param == torch.float64
    assert resolve_dtypes(PrecisionSection(param="fp16"), CPU).needs_loss_scale
