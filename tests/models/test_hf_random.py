"""Random weights of transformers' models, drawn module by module: distributed as in a model built whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp.models.hf_weights import ModuleDraws
from tests.models import small_hf
from tests.run.hf_folders import _model

pytestmark = [pytest.mark.slow, pytest.mark.needs("transformers")]

NAMES = ["llama", "tied", "qwen3", "gemma3", "gpt2", "bert", "t5", "vit", "mixtral"]


def build(name: str) -> nn.Module:
    return small_hf.gemma3() if name == "gemma3" else _model(name)


@pytest.mark.parametrize("name", NAMES)
def test_each_tensor_is_distributed_as_in_a_whole_model(name: str) -> None:
    torch.manual_seed(0)
    whole = build(name).state_dict()
    draws = ModuleDraws(lambda: build(name), 0)
    assert draws.keys() == whole.keys()
    for key, expected in whole.items():
        found = draws[key]
        assert found.dtype == expected.dtype
        if expected.numel() < 2 or float(expected.std()) == 0:
            assert torch.equal(found, expected), key
        elif expected.numel() >= 200:
            assert float(found.std()) == pytest.approx(float(expected.std()), rel=0.3), key
        assert found.shape == expected.shape
        assert torch.equal(draws[key], found)
    other = ModuleDraws(lambda: build(name), 1)
    assert any(not torch.equal(draws[key], other[key]) for key in whole)
