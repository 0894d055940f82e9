"""One step: the order of its phases, which a plan traces too, and a skipped update that changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.plan_real import build
from fsdp.config import load
from fsdp.distributed.env import DistEnv
from fsdp.distributed.mesh import MeshSizes
from fsdp.models.loss import LossFunction, LossParts
from fsdp.plan.fake_step import FakeRun, trace_step
from fsdp.run.step import Totals, train_step
from tests.support.world import run_world

WORDS = (
    "--data.name tests.support.user_code:vectors --model.name tests.support.user_code:Uneven "
    "--train.global_batch 6 --train.micro_batch 3 --optim.lr 0.1"
)
PHASES = ["forward", "backward", "forward", "backward", "reduce", "optimizer"]


class Refusing:
    """Verdicts that refuse each update."""

    own_loss: Tensor

    def may_update(self, step: int, loss: Tensor | None, norm: Tensor) -> bool:
        return False


@dataclass
class Recorded(Totals):
    total: Tensor | None = None

    def weight(self) -> float:
        return 6.0

    def reduce(self, numbers: Tensor, scaled: Tensor) -> None:
        self.total = numbers.detach()


def stepped(env: DistEnv, update: bool) -> tuple[list[str], bool, bool]:
    """Phases of a step of two micro-batches, whether parameters changed, and whether gradients are left."""
    built, phases = build(tuple(WORDS.split()), 1, 0, env.device), list[str]()
    verdicts: Any = None if update else Refusing()
    parts = replace(built.watched.parts, verdicts=verdicts, enter=phases.append)
    parameters = list(parts.sharded.root.parameters())
    before = [p.detach().clone() for p in parameters]
    train_step(parts, built.batches("cpu"), 2, step=1, lr=0.1, totals=Recorded())
    changed = any(not torch.equal(a, b.detach()) for a, b in zip(before, parameters, strict=True))
    return phases, changed, any(p.grad is not None for p in parameters)


@pytest.mark.parametrize(("update", "phases"), [(True, PHASES), (False, PHASES[:-1])])
def test_a_skipped_update_changes_nothing(update: bool, phases: list[str]) -> None:
    assert run_world(1, stepped, update) == [(phases, update, False)]


def totals(env: DistEnv) -> list[Tensor]:
    """The losses of two micro-batches, and what is reduced of them."""
    built = build(tuple(WORDS.split()), 1, 0, env.device)
    parts, sums, losses = built.watched.parts, Recorded(), list[Tensor]()
    call = LossFunction.__call__

    def recorded(*given: Any) -> LossParts:
        loss = call(*given)
        losses.append(loss.loss_sum.detach().double())
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossFunction, "__call__", recorded)
        train_step(parts, built.batches("cpu"), 2, step=1, lr=0.1, totals=sums)
    assert sums.total is not None
    return [*losses, sums.total]


def test_the_losses_of_all_micro_batches_are_reduced() -> None:
    [(first, second, total)] = run_world(1, totals)
    assert torch.equal(total, first + second)
    assert not torch.equal(total, second)


def test_a_plan_traces_the_same_phases() -> None:
    trace = trace_step(FakeRun(load(WORDS.split()), MeshSizes("fsdp", 1, 1), 0, 3, 2, "cpu"))
    names = [(part.micro, part.phase) for part in trace.parts]
    assert [phase for (_, phase), _ in groupby(names)] == PHASES
