"""A Hugging Face model, built from its config by a factory of five lines, is all that a sharder needs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp.config import ModelSection
from fsdp.models import ModelSpec, build_real, load_attribute, resolve
from fsdp.models.blocks import find_units

pytestmark = [pytest.mark.slow, pytest.mark.needs("transformers")]  # importing transformers takes seconds

FACTORY = """
from transformers import LlamaConfig, LlamaForCausalLM

def llama(vocab_size: int, width: int = 32, layers: int = 3, tied: bool = False):
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocab_size, hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=2 * width, tie_word_embeddings=tied,
    ))
"""


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    return resolve_llama(tmp_path, monkeypatch)


def resolve_llama(folder: Path, monkeypatch: pytest.MonkeyPatch, **args: bool) -> ModelSpec:
    (folder / "my_llama.py").write_text(FACTORY)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "my_llama", raising=False)
    return resolve(ModelSection(name="my_llama:llama", args=args), {"vocab_size": 100, "seq_len": 16})


def on_meta(spec: ModelSpec) -> nn.Module:
    with torch.device("meta"):
        return spec.build()


def test_it_is_built_on_meta_with_nothing_left_outside(llama: ModelSpec) -> None:
    model = on_meta(llama)
    assert {p.device.type for p in [*model.parameters(), *model.buffers()]} == {"meta"}
    assert not [(n, k) for n, m in model.named_modules() for k, v in vars(m).items() if isinstance(v, torch.Tensor)]
    assert not llama.knows_inits
    assert llama.sizes == {"vocab_size": 100}


def test_its_tables_are_in_no_state_dict_so_a_source_must_send_them(llama: ModelSpec) -> None:
    model = on_meta(llama)
    tables = {name for name, _ in model.named_buffers()} - model.state_dict().keys()
    assert "model.rotary_emb.inv_freq" in tables
    real = build_real(llama, seed=0)
    assert all(buffer.isfinite().all() for buffer in real.buffers())
    assert dict(real.named_buffers())["model.rotary_emb.inv_freq"][0] == 1.0


@pytest.mark.parametrize("tied", [False, True])
def test_its_layers_are_its_units(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta(resolve_llama(tmp_path, monkeypatch, tied=tied))
    known = {module: name for name, module in model.named_modules()}
    assert [known[module] for [module] in find_units(model)] == [f"model.layers.{i}" for i in range(3)]
    assert [known[module] for [module] in find_units(model, "class:LlamaDecoderLayer")] == [
        f"model.layers.{i}" for i in range(3)
    ]
    both = [known[module] for [module] in find_units(model, "class:Embedding,LlamaDecoderLayer")]
    assert ("model.embed_tokens" in both) is not tied


def test_its_weights_follow_from_the_seed_and_it_trains(llama: ModelSpec) -> None:
    first, again, other = (build_real(llama, seed) for seed in (1, 1, 2))
    weights = [dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"] for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    logits = first(torch.randint(0, 100, (2, 16))).logits
    logits.sum().backward()
    assert all(p.grad is not None for p in first.parameters())


def test_a_method_of_a_class_can_be_a_factory() -> None:
    assert load_attribute("transformers:AutoModelForCausalLM.from_config", "--model.name").__name__ == "from_config"
