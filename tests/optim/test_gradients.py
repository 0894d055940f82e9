"""The gradient norm and clipping on any mesh, beside tensors that are not sharded, against torch's own on the
whole model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp.distributed.env import DistEnv
from fsdp.distributed.mesh import Strategy
from fsdp.optim.gradients import Gradients
from fsdp.run.step import gradients_of
from tests.shard.test_materialize import made
from tests.support import user_code
from tests.support.marks import quick_are
from tests.support.world import run_world


def norms(env: DistEnv, strategy: Strategy, name: str) -> list[float]:
    """Norm, norm after clipping to 0.3, torch's own on the whole model; then with a NaN and an infinity on
    one rank.
    """
    sharded = made(env, getattr(user_code, name), strategy=strategy)
    parameters = [p for p in sharded.root.parameters() if p.requires_grad]
    plain = [
        nn.Parameter(p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone()) for p in parameters
    ]
    for parameter, whole in zip(parameters, plain, strict=True):
        parameter.grad = parameter.detach().clone() * 3
        whole.grad = whole.detach() * 3
    gradients = gradients_of(sharded)
    first = gradients.norm()
    gradients.clip(0.3, first)
    found = [
        float(first),
        float(gradients.norm()),
        float(torch.nn.utils.get_total_norm([p.grad for p in plain if p.grad is not None])),
    ]
    for value in (float("inf"), float("nan")):
        if env.rank == 0 and strategy != "ddp":
            next(g for g in gradients._locals(gradients._sharded) if g.numel()).fill_(value)
        found.append(float(gradients.norm()))
    return found


@pytest.mark.parametrize("name", ["Uneven", "Scalar", "Tiny", "Frozen"])
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    quick_are(
        [(2, "fsdp"), (2, "ddp"), (4, "hsdp")],
        [(1, "fsdp"), (2, "fsdp"), (3, "fsdp"), (4, "hsdp"), (2, "ddp")],
    ),
)
def test_the_norm_is_the_whole_model_s_on_every_mesh(ranks: int, strategy: Strategy, name: str) -> None:
    found = run_world(ranks, norms, strategy, name)
    for first, clipped, expected, *_ in found:
        assert first == pytest.approx(expected, rel=1e-6)
        assert clipped == pytest.approx(0.3, rel=1e-5)
    if strategy == "fsdp":
        assert all(values[3] == float("inf") and values[4] != values[4] for values in found)


def test_a_norm_below_the_bound_changes_nothing() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 0.1)
    gradients = Gradients([parameter], None)
    gradients.clip(1.0, gradients.norm())
    assert torch.equal(parameter.grad, torch.full((4,), 0.1))
    kernel: Any = torch.optim.AdamW([parameter])
    gradients.clip(1.0, gradients.norm(), kernel)
    assert kernel.grad_scale == 1
