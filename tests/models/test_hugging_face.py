"""Recomputation of models of transformers, which come with their key-value caches on."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fsdp.config import load
from fsdp.models import ModelSpec, build_real
from fsdp.models.hf import turn_caches_off
from fsdp.models.units import find_units
from fsdp.run import job
from fsdp.run.job import model_of
from fsdp.shard.activations import apply_activation_checkpointing

pytestmark = [pytest.mark.slow, pytest.mark.needs("transformers")]  # importing transformers takes seconds


# ---------------------------------------------------------------- recomputation

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def as_it_comes(name: str) -> nn.Module:
    """From a small configuration that leaves the cache as it is: on."""
    import transformers as hf

    if name == "gemma3":
        return hf.Gemma3ForCausalLM(
            hf.Gemma3TextConfig(**SMALL, sliding_window=4, num_key_value_heads=2, head_dim=8)
        )
    if name == "t5":
        sizes: dict[str, Any] = {
            "decoder_start_token_id": 0,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
        }
        config = hf.T5Config(vocab_size=64, **sizes, dropout_rate=0.0)
        return hf.T5ForConditionalGeneration(config)
    sizes = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=64, **sizes, **dropout, bos_token_id=0, eos_token_id=0)
    )


def trained(name: str, *words: str) -> list[torch.Tensor]:
    """Gradients of a padded batch, of a model as a run prepares it."""
    config = load([*words])
    spec = ModelSpec(name=name, build=partial(as_it_comes, name), sizes={}, knows_inits=False)
    assert not any(p.device.type != "meta" for p in model_of(config, spec).parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "meta_model", lambda spec, seed: build_real(spec, seed))
        model = model_of(config, spec)
    apply_activation_checkpointing(find_units(model), config.memory)
    tokens = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    model(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", ["gemma3", "t5", "gpt2"])
def test_recomputation_computes_the_same(name: str) -> None:
    expected = trained(name)
    for words in ("activation_checkpointing full", "activation_checkpointing ops"):
        found = trained(name, *f"--memory.{words}".split())
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), words


def test_caches_are_off_in_every_configuration() -> None:
    model = as_it_comes("t5")
    turn_caches_off(model)
    configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    assert len({id(config) for config in configs}) > 1
    assert not any(config.use_cache for config in configs)
