"""What holds for each of OPTIMIZERS, and for a name that has been added there alone: it is not built as Adam,
and flags that would have no effect on it are refused.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from fsdp.base.errors import ConfigError
from fsdp.config import Config, OptimSection
from fsdp.config.checks import check
from fsdp.config.sections import ADAMS, FUSED, IN_PARTS, MOMENTS, OPTIMIZERS, READS
from fsdp.memory.account import resting_bytes
from fsdp.optim.optimizer import build_optimizer
from fsdp.parallel.offload import moments_of
from fsdp.parity.reference import build_optimizers


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_counted_states_are_those_after_a_step(name: str) -> None:
    made, section = model(), OptimSection(name=name, muon_parameters="0.weight" if name == "muon" else "")
    optimizer = build_optimizer(section, made)
    for parameter in made.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = moments_of(optimizer, made.parameters())
    assert (
        sum(value.nbytes for _, _, value in states) == resting_bytes(section, made, torch.float32).optimizer
    )
    if name in IN_PARTS:
        assert {kept for _, kept, _ in states} == set(MOMENTS[name])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_those_of_fused_and_no_others_have_the_kernel(name: str) -> None:
    section = OptimSection(name=name, fused="true", muon_parameters="0.weight" if name == "muon" else "")
    groups = build_optimizer(section, model()).param_groups
    assert any(group.get("fused") for group in groups) is (name in FUSED)


def test_each_name_s_states_and_settings_are_listed() -> None:
    assert set(MOMENTS) == set(READS) == set(OPTIMIZERS)
    assert set(ADAMS) < set(IN_PARTS) < set(OPTIMIZERS)


def test_a_name_without_a_branch_is_not_built_as_adam() -> None:
    section = OptimSection(name="new")
    with pytest.raises(KeyError, match="new"):
        build_optimizer(section, model())
    with pytest.raises(KeyError, match="new"):
        resting_bytes(section, model(), torch.float32)
    with pytest.raises(KeyError, match="new"):
        build_optimizers(section, model())


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("optim", {"state": "bf16"}),
        ("optim", {"fused": "true"}),
        ("optim", {"weight_decay": 0.3}),
        ("optim", {"beta1": 0.5}),
        ("optim", {"eps": 1e-3}),
        ("optim", {"momentum": 0.5}),
        ("mesh", {"unsharded": "*.bias"}),
        ("precision", {"master": "bf16"}),
        ("memory", {"nvme": "optimizer", "nvme_dir": "/tmp/disk"}),
        ("memory", {"optimizer_offload": True}),
    ],
    ids=str,
)
def test_flags_that_a_new_name_has_not_been_given_are_refused(
    section: str, change: dict[str, object]
) -> None:
    config = dataclasses.replace(Config(), optim=OptimSection(name="new"))
    check(config)
    changed = dataclasses.replace(getattr(config, section), **change)
    with pytest.raises(ConfigError, match=r"--optim\.name new"):
        check(dataclasses.replace(config, **{section: changed}))
