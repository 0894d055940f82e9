"""A model with its initial weights on one device: a function of the seed alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdp.config import ModelSection
from fsdp.models import build_real, resolve
from fsdp.models.init import draw

SMALL = {"transformer": {"layers": 2, "width": 32}, "vit": {"layers": 1}, "mlp": {"hidden": 16}}


@pytest.mark.parametrize("name", SMALL)
def test_each_parameter_is_its_own_stream(name: str) -> None:
    spec = resolve(ModelSection(name=name, args=SMALL[name]), {})
    random_before = torch.get_rng_state()
    model = build_real(spec, seed=3)
    inits = model.param_inits()  # type: ignore[operator]
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter.detach().view(-1), draw(inits[key], 3, key, 0, parameter.numel())), key
    assert all(tensor.isfinite().all() for tensor in [*model.parameters(), *model.buffers()])
    assert torch.equal(torch.get_rng_state(), random_before)


def test_seeds_differ_and_ties_hold() -> None:
    spec = resolve(ModelSection(name="transformer", args={"layers": 1, "tied": True}), {})
    a, b = (build_real(spec, seed) for seed in (0, 1))
    assert not torch.equal(a.embedding.weight, b.embedding.weight)  # type: ignore[union-attr,arg-type]
    assert a.head.weight is a.embedding.weight  # type: ignore[union-attr]


def test_a_model_without_inits_is_built_from_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_init.py").write_text("""
import random
import numpy as np
import torch
from torch import nn

def build():
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.bias += random.random() + np.random.rand()
    model.register_buffer("table", torch.arange(3.0), persistent=False)
    return model
""")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    spec = resolve(ModelSection(name="own_init:build"), {})
    numpy_state: Any = np.random.get_state()
    before = torch.get_rng_state(), random.getstate(), numpy_state[1].copy()
    first, again, other = build_real(spec, 1), build_real(spec, 1), build_real(spec, 2)
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
        assert not torch.equal(value, other.state_dict()[name])
    assert torch.equal(first.table, torch.arange(3.0))  # type: ignore[arg-type]
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]  # type: ignore[index]
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert (before[2] == after[2]).all()
