"""A Hugging Face model built from its config by a user's factory."""

from __future__ import annotations

from torch import nn


def llama(tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=31,
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=40,
            tie_word_embeddings=tied,
        )
    )
