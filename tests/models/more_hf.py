"""Mixtures of experts of transformers whose sizes leave a run with the loop over experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.models.small_hf import HEADS, SIZES

DEEP: dict[str, Any] = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "num_key_value_heads": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoe": (
        "GraniteMoeForCausalLM",
        SIZES | {"num_local_experts": 3, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", SIZES | DEEP),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        SIZES | HEADS | {"num_key_value_heads": 1, "num_experts": 3, "num_experts_per_tok": 2,
         "moe_intermediate_size": 20, "shared_expert_intermediate_size": 20, "linear_num_key_heads": 2,
         "linear_num_value_heads": 2, "linear_key_head_dim": 12, "linear_value_head_dim": 12,
         "layer_types": ["linear_attention", "full_attention"]},
    ),
}  # fmt: skip


def build(name: str, fields: dict[str, Any]) -> nn.Module:
    import transformers

    cls = getattr(transformers, name)
    built: nn.Module = cls(cls.config_class(**fields))
    return built
