"""A sum over the ranks that a backward starts: after the last gradient, once, and also without a backward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp.dist.collectives import Sum
from fsdp.dist.env import DistEnv
from tests.support.world import run_world


def behind(env: DistEnv, backward: bool) -> tuple[list[str], float]:
    """What happened in which order on this rank, and the sum."""
    order: list[str] = []
    plain = dist.all_reduce

    def heard(*args: object, **kwargs: object) -> object:
        order.append("sum")
        return plain(*args, **kwargs)  # type: ignore[arg-type]

    dist.all_reduce = heard  # type: ignore[assignment]
    try:
        weight = torch.ones((), requires_grad=True)
        weight.register_post_accumulate_grad_hook(lambda _: order.append("the last gradient"))
        loss = weight * 2
        sum_of_all = Sum(torch.tensor([float(env.rank + 1)]), behind=loss)
        order.append("forward")
        if backward:
            loss.backward()
        return order, float(sum_of_all.wait())
    finally:
        dist.all_reduce = plain


@pytest.mark.parametrize(
    ("backward", "order"),
    [(True, ["forward", "the last gradient", "sum"]), (False, ["forward", "sum"])],
    ids=["backward", "none"],
)
def test_a_sum_behind_a_backward_begins_when_all_is_computed(backward: bool, order: list[str]) -> None:
    assert run_world(2, behind, backward) == [(order, 3.0)] * 2
