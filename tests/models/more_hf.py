"""Small models of other architectures of transformers, as --model.name takes them; the data are those of
small_hf.py.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.models.small_hf import HEADS, LABELS, NO_DROPOUT, ROUTED, SIZES, START, WORDS

ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
SHORT: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 24, "num_attention_heads": 2}
BART: dict[str, Any] = {
    "vocab_size": WORDS, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40,
    "dropout": 0.0, "max_position_embeddings": 16,
}  # fmt: skip
PIXELS: dict[str, Any] = {"image_size": 8, "patch_size": 4, "num_channels": 1}
DEEP: dict[str, Any] = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "num_key_value_heads": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3ForCausalLM", SIZES | ENDS),
    "olmo2": ("Olmo2ForCausalLM", SIZES | ENDS),
    "gemma2": ("Gemma2ForCausalLM", SIZES | HEADS | {"num_key_value_heads": 1}),
    "falcon": ("FalconForCausalLM", SIZES | {"hidden_dropout": 0.0}),
    "bloom": ("BloomForCausalLM", SHORT | {"n_layer": 2, "n_head": 2}),
    "gpt_neox": ("GPTNeoXForCausalLM", SIZES),
    "opt": ("OPTForCausalLM", SIZES | {"ffn_dim": 40, "word_embed_proj_dim": 24, "dropout": 0.0}),
    "mpt": ("MptForCausalLM", {"vocab_size": WORDS, "d_model": 24, "n_layers": 2, "n_heads": 2}),
    "cohere": ("CohereForCausalLM", SIZES),
    "glm4": ("Glm4ForCausalLM", SIZES | ENDS | HEADS | {"num_key_value_heads": 1}),
    "granitemoe": ("GraniteMoeForCausalLM", SIZES | ENDS | {"num_local_experts": 3}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", SIZES | DEEP),
    "mamba2": (
        "Mamba2ForCausalLM",
        SIZES | {"state_size": 4, "num_heads": 4, "head_dim": 12, "n_groups": 1, "chunk_size": 4},
    ),
    "rwkv": ("RwkvForCausalLM", SIZES),
    "jamba": (
        "JambaForCausalLM",
        SIZES | ROUTED | {"num_hidden_layers": 4, "num_experts": 3, "pad_token_id": 0,
         "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
         "mamba_d_state": 4, "mamba_dt_rank": 4},
    ),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", SIZES | {"lru_width": 24, "num_hidden_layers": 3}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        SIZES | HEADS | {"num_key_value_heads": 1, "num_experts": 3, "num_experts_per_tok": 2,
         "moe_intermediate_size": 20, "shared_expert_intermediate_size": 20, "linear_num_key_heads": 2,
         "linear_num_value_heads": 2, "linear_key_head_dim": 12, "linear_value_head_dim": 12,
         "layer_types": ["linear_attention", "full_attention"]},
    ),
    "deberta": ("DebertaV2ForMaskedLM", SIZES | NO_DROPOUT),
    "roberta": (
        "RobertaForMaskedLM", SIZES | NO_DROPOUT | {"pad_token_id": 0, "max_position_embeddings": 16}
    ),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"vocab_size": WORDS, "dim": 24, "n_layers": 2, "n_heads": 2, "hidden_dim": 40, "dropout": 0.0,
         "attention_dropout": 0.0},
    ),
    "modernbert": ("ModernBertForMaskedLM", SIZES | ENDS | {"cls_token_id": 0, "sep_token_id": 0}),
    "albert": ("AlbertForMaskedLM", SIZES | NO_DROPOUT | {"embedding_size": 12}),
    "bart": ("BartForConditionalGeneration", BART | START | ENDS | {"forced_eos_token_id": None}),
    "pegasus": ("PegasusForConditionalGeneration", BART | START | ENDS),
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        {"vocab_size": WORDS, "d_model": 24, "d_kv": 12, "d_ff": 40, "num_layers": 2, "num_heads": 2,
         "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
         "num_experts": 3, "dropout_rate": 0.0, "pad_token_id": 0, "router_jitter_noise": 0.0} | START,
    ),
    "gpt2_classes": (
        "GPT2ForSequenceClassification",
        {"vocab_size": WORDS, "n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 16, "resid_pdrop": 0.0,
         "embd_pdrop": 0.0, "attn_pdrop": 0.0} | ENDS | LABELS,
    ),
    "convnextv2": (
        "ConvNextV2ForImageClassification",
        {"num_channels": 1, "patch_size": 1, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1]} | LABELS,
    ),
    "swin": (
        "SwinForImageClassification",
        PIXELS | LABELS | {"patch_size": 1, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2],
         "window_size": 4, "drop_path_rate": 0.0},
    ),
    "clip": ("CLIPForImageClassification", {"vision_config": SIZES | PIXELS} | LABELS),
    "dinov2": ("Dinov2ForImageClassification", SIZES | PIXELS | LABELS),
}  # fmt: skip


def build(name: str, fields: dict[str, Any]) -> nn.Module:
    import transformers

    cls = getattr(transformers, name)
    built: nn.Module = cls(cls.config_class(**fields))
    return built
