"""--precision.master bf16: parameters in half the bytes, updated in fp32 and rounded stochastically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp.config import OptimSection
from fsdp.distributed.env import DistEnv
from fsdp.optim.optimizer import build_optimizer
from tests.support.marks import quick_are
from tests.support.runs import Finished, failures, run
from tests.support.world import run_world

MASTER = "--precision.master bf16"
STEPS = 5


# ---------------------------------------------------------------- the update


def stepped(model: nn.Module, section: OptimSection, steps: int) -> None:
    """Updates by gradients that follow from step and parameter."""
    optimizer = build_optimizer(section, model)
    for step in range(steps):
        for at, parameter in enumerate(model.parameters()):
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + at))
            whole = drawn.bfloat16()
            if isinstance(parameter, DTensor):
                parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            else:
                parameter.grad = whole
        optimizer.step()


def layers() -> nn.Module:
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(300, 7), nn.Tanh(), nn.Linear(7, 100, bias=False), nn.Linear(100, 101))
    return found.bfloat16()


def sharded_update(env: DistEnv, state: Any) -> list[Tensor]:
    model = layers()
    fully_shard(model, mesh=init_device_mesh("cpu", (env.world_size,), mesh_dim_names=("dp_shard",)))
    stepped(model, OptimSection(state=state), STEPS)
    return [p.full_tensor().detach() for p in model.parameters() if isinstance(p, DTensor)]


@pytest.mark.parametrize("state", ["master", "8bit"])
def test_shards_are_updated_as_the_whole_to_the_bit(state: Any) -> None:
    model = layers()
    stepped(model, OptimSection(state=state), STEPS)
    for found in run_world(3, sharded_update, state):
        assert all(torch.equal(a, b) for a, b in zip(found, model.parameters(), strict=True))


def test_updates_below_the_resolution_of_bf16_move_the_mean() -> None:
    """A step of 1e-4 is a fortieth of what bf16 shows below 1: rounded to the nearest it would be none."""
    model = nn.Linear(256, 256, bias=False).bfloat16()
    start = nn.init.ones_(model.weight).detach().clone()
    optimizer = build_optimizer(OptimSection(lr=1e-4, weight_decay=0.0), model)
    for _ in range(50):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    moved = (start.float() - model.weight.detach().float()).mean()
    # 65,536 elements: the mean of their rounding has a deviation of about 5e-5
    assert float(moved) == pytest.approx(50 * 1e-4, abs=3e-4)
    assert torch.equal((start.float() - 1e-4).bfloat16(), start)
    assert len(model.weight.unique()) > 1


TEACHER = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def start(dtype: torch.dtype) -> nn.Module:
    model = nn.Linear(64, 32, bias=False)
    with torch.no_grad():
        model.weight.copy_(TEACHER + 0.03 * torch.randn(32, 64, generator=torch.Generator().manual_seed(2)))
    return model.to(dtype)


# ---------------------------------------------------------------- runs


def losses(finished: Finished) -> list[float]:
    return [record["loss"] for record in finished.records if "loss" in record]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "more"),
    quick_are([], [(2, ""), (3, "--optim.state 8bit --model.args.width 80")], [(2, "")]),
)
def test_a_resumed_run_equals_the_unbroken_run(ranks: int, more: str, tmp_path: Path) -> None:
    words = f"{MASTER} {more} --optim.warmup_steps 0 --data.args.count 48"
    straight = run(ranks, tmp_path / "straight", words)
    assert failures(ranks, tmp_path / "cut", words, "--train.stop_after 9") == [None] * ranks
    for text in failures(ranks, tmp_path / "cut", more):
        assert "HINT: --precision.master bf16" in str(text)
    resumed = run(ranks, tmp_path / "cut", words)
    assert losses(resumed) == losses(straight)
    assert straight.parameters["head.weight"].dtype == torch.bfloat16
    assert all(torch.equal(resumed.parameters[n], value) for n, value in straight.parameters.items())
