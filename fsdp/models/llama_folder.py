"""The transformer in transformers' format, for `--checkpoint.export_format hf`: tensor names and config.json.

It is written as the class of Llama's family that computes the same. transformers is not imported. Not here:
writing (fsdp/checkpoint/export.py), or reading such a folder, which `--model.name hf:FOLDER` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SIZES = {
    "vocab_size": "vocab_size", "width": "hidden_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "ffn": "intermediate_size",
    "head_dim": "head_dim", "norm_eps": "rms_norm_eps", "tied": "tie_word_embeddings",
}  # fmt: skip
"""Size of the transformer → field of config.json."""
_ROPE = {
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor", "original_max_position_embeddings": "rope_original_len",
        "low_freq_factor": "rope_low_freq", "high_freq_factor": "rope_high_freq",
    },
    "yarn": {
        "factor": "rope_factor", "original_max_position_embeddings": "rope_original_len",
        "beta_fast": "rope_beta_fast", "beta_slow": "rope_beta_slow",
        "attention_factor": "rope_attention",
    },
}  # fmt: skip
"""Kind of scaled positions → field of config.json → size of the transformer; a size of 0 is left out."""
_BLOCK = {
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj", "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm", "ffn.gate": "mlp.gate_proj", "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}  # fmt: skip
_OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def saved_layer(name: str) -> str:
    """transformers' name of a module."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, number, part = name.split(".", 2)
    return f"model.layers.{number}.{_BLOCK[part]}"


def saved_name(name: str) -> str:
    layer, _, kind = name.rpartition(".")
    return f"{saved_layer(layer)}.{kind}"


@dataclass(frozen=True, kw_only=True)
class LlamaFormat:
    """A transformer of these sizes as a folder of save_pretrained."""

    fields: Mapping[str, Any]
    build: Callable[[], nn.Module]
    folder: None = None
    dtype: torch.dtype | None = None

    @property
    def class_name(self) -> str:
        return CLASSES[self.fields["model_type"]]

    def saved_pieces(self, model: Any) -> dict[str, dict[str, Tensor]]:
        return {name: {saved_name(name): tensor} for name, tensor in model.named_parameters()}

    def reverted(self, model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
        return {saved_name(name): tensor}

    def saved_layer(self, name: str) -> str:
        return saved_layer(name)

    def config_json(self, dtype: torch.dtype) -> str:
        named = {"architectures": [self.class_name], "dtype": str(dtype).removeprefix("torch.")}
        return json.dumps({**self.fields, **named}, indent=2, sort_keys=True) + "\n"


def from_sizes(sizes: Mapping[str, Any], build: Callable[[], nn.Module]) -> LlamaFormat:
    """The format of a transformer with these sizes; ConfigError if no class computes the same."""
    scaling = sizes["rope_scaling"]
    rope = {"rope_type": scaling or "default", "rope_theta": sizes["rope_theta"]}
    rope |= {field: sizes[size] for field, size in _ROPE.get(scaling, {}).items() if sizes[size]}
    fields = {
        "model_type": _class_of(sizes), "hidden_act": "silu",
        **{field: sizes[name] for name, field in SIZES.items()},
        "max_position_embeddings": sizes["max_seq_len"], "rope_parameters": rope,
        # The older names of the same, which other programs read
        "rope_theta": rope["rope_theta"], "rope_scaling": rope if scaling else None,
        "attention_bias": sizes["qkv_bias"], "mlp_bias": sizes["ffn_bias"], "attention_dropout": 0.0,
        "use_sliding_window": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    return LlamaFormat(fields=fields, build=build)


def _class_of(sizes: Mapping[str, Any]) -> str:
    """Llama has biases of all projections and of the feed-forward, Qwen2 of q, k and v; Qwen3 has norms."""
    qkv, out, norm, ffn = (sizes[name] for name in ("qkv_bias", "out_bias", "qk_norm", "ffn_bias"))
    if qkv == out and not (norm and ffn):
        return "qwen3" if norm else "llama"
    if qkv and not out and not norm and not ffn:
        return "qwen2"
    chosen = ", ".join(name for name in ("qk_norm", "qkv_bias", "out_bias", "ffn_bias") if sizes[name])
    raise ConfigError(
        f"--checkpoint.export_format hf: no class of transformers has {chosen} and no more.",
        "--checkpoint.export_format safetensors",
    )
