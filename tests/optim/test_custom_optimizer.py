"""--optim.name package.module:factory: trained, resumed and planned as the built-in ones; refused by name
where a checkpoint of its states could not be resumed on other ranks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp.base.errors import ConfigError
from fsdp.config import OptimSection
from fsdp.optim.optimizer import build_optimizer
from tests.support import plain_loop
from tests.support.marks import quick_are
from tests.support.plain_loop import Trained, relative_difference, train_plainly
from tests.support.runs import failures, run, settings
from tests.support.user_code import Uneven

OWN = "tests.optim.test_custom_optimizer:"
FP64 = "--precision.master fp64 --precision.param fp64 --train.steps 6"
Named = Iterable[tuple[str, Tensor]]


class Lion(torch.optim.Optimizer):
    """As in the documentation; `state_of` makes a parameter's momentum."""

    state_of: Any = staticmethod(torch.zeros_like)

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                    state["updates"] = 0
                    state["extra"] = self.state_of(parameter)
                state["updates"] += 1
                mean = state["momentum"]
                update = mean.lerp(parameter.grad, 1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                mean.lerp_(parameter.grad, 1 - beta2)


def groups_of(named: Named, decay: float) -> list[dict[str, Any]]:
    everything = list(named)
    matrices = [p for name, p in everything if name.endswith("weight") and p.dim() >= 2]
    others = [p for name, p in everything if not (name.endswith("weight") and p.dim() >= 2)]
    return [{"params": matrices, "weight_decay": decay}, {"params": others}]


def lion(
    named_parameters: Named, *, lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    return Lion(groups_of(named_parameters, weight_decay), lr, betas)


def with_state(state_of: Any) -> Any:
    class Other(Lion):
        pass

    Other.state_of = staticmethod(state_of)
    return lambda named_parameters, lr, betas: Other([p for _, p in named_parameters], lr, betas)


local_part = with_state(lambda p: torch.zeros(p.to_local().shape if isinstance(p, DTensor) else p.shape))
whole = with_state(lambda p: torch.zeros(p.shape))
by_rank = with_state(lambda p: torch.full((4,), float(dist.get_rank())))
nested = with_state(lambda p: {"rows": 0})
of_numpy = with_state(lambda p: np.sqrt(np.float64(p.dim())))
rows = with_state(lambda p: (p * 1).sum(-1) if p.dim() > 1 else torch.zeros_like(p))


def without_head(named_parameters: Named, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for name, p in named_parameters if name != "head.bias"], lr=lr)


def of_copies(named_parameters: Named, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([p.detach().clone() for _, p in named_parameters], lr=lr)


def a_list(named_parameters: Named, lr: float) -> Any:
    return list(named_parameters)


def failing(named_parameters: Named, lr: float) -> Any:
    raise ValueError("no such thing")


@functools.cache
def plain(factory: str) -> Trained:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        if factory == "torch.optim:NAdam":
            return torch.optim.NAdam(
                [p for _, p in named], lr=1.0, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8
            )
        return lion(named, lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_loop, "_adamw", build)
        return train_plainly(settings(FP64), dtype="fp64", steps=6)


@pytest.mark.parametrize(
    ("factory", "ranks", "more"),
    [
        (OWN + "lion", 2, ""),
        (OWN + "lion", 2, "--mesh.strategy ddp"),
        (OWN + "lion", 2, "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 1"),
        ("torch.optim:NAdam", 3, ""),
    ],
)
def test_a_run_updates_as_one_process_does(factory: str, ranks: int, more: str, tmp_path: Path) -> None:
    finished = run(ranks, tmp_path, FP64, f"--optim.name {factory}", more)
    assert relative_difference(finished.parameters, plain(factory).parameters) <= 1e-10


@pytest.mark.long
@pytest.mark.parametrize("factory", quick_are([OWN + "lion"], [OWN + "lion", "torch.optim:NAdam"], []))
def test_a_run_resumes_on_other_numbers_of_ranks(factory: str, tmp_path: Path) -> None:
    flags = f"{FP64} --optim.name {factory}"
    assert failures(2, tmp_path, flags, "--train.stop_after 2") == [None] * 2
    assert failures(1, tmp_path, flags, "--train.stop_after 4") == [None]
    finished = run(3, tmp_path, flags)
    assert relative_difference(finished.parameters, plain(factory).parameters) <= 1e-10


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("local_part", "state extra of stem.weight is a plain tensor of (7, 12), the shape of its"),
        ("whole", "state extra of stem.weight is a plain tensor of (13, 12), the shape of its"),
        ("by_rank", "state extra of stem.weight is a plain tensor that differs between ranks"),
        ("nested", "state extra of stem.weight is a dict"),
        ("of_numpy", "state extra of stem.weight is a float64"),
        ("rows", "state extra of stem.weight is a DTensor of (13,), sharded unlike its parameter"),
    ],
)
def test_states_that_other_ranks_could_not_resume_are_refused_after_the_first_update(
    name: str, message: str, tmp_path: Path
) -> None:
    said = failures(2, tmp_path, f"--train.steps 2 --optim.name {OWN}{name}")
    for line in said:
        assert line is not None
        assert line.startswith(f"ConfigError: --optim.name {OWN}{name}: {message}"), line
        assert "HINT: keep torch.zeros_like(parameter)" in line


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (OWN + "without_head", "the optimizer leaves out head.bias"),
        (OWN + "of_copies", "the optimizer holds a tensor that is no trained parameter"),
        (OWN + "a_list", "returned a list. HINT: return a torch.optim.Optimizer"),
        (OWN + "failing", "failed: ValueError: no such thing ("),
        (OWN + "absent", "has no attribute 'absent'"),
        ("torch.optim:LBFGS", "step() of LBFGS needs a closure"),
    ],
)
def test_a_factory_that_returns_something_else_is_one_line(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_optimizer(OptimSection(name=name), Uneven())


# ---------------------------------------------------------------- a start with another optimizer
