"""Small models of still other architectures of transformers,
        as --model.name takes them; the data are those of
small_hf.py.
"""

from __future__ import annotations

from typing import Any

from tests.models.more_hf import BART, DEEP, ENDS, PIXELS
from tests.models.small_hf import HEADS, LABELS, NO_DROPOUT, ROUTED, SIZES, START, WORDS

ONE: dict[str, Any] = {"num_key_value_heads": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("StableLmForCausalLM", SIZES | ENDS | ONE | {"partial_rotary_factor": 0.5}),
    "granite": ("GraniteForCausalLM", SIZES | ENDS | ONE),
    "mistral": ("MistralForCausalLM", SIZES | HEADS | ONE | {"sliding_window": 3}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", SIZES | DEEP | {"q_lora_rank": 8, "topk_method": "greedy"}),
    "bamba": (
        "BambaForCausalLM",
        SIZES | ENDS | ONE | {"num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 4,
         "mamba_d_head": 12, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 4},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        SIZES | ENDS | HEADS | ONE | {"intermediate_size_mlp": 40, "num_local_experts": 3,
         "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 4,
         "output_router_logits": False},
    ),
    "gemma3n": (
        "Gemma3nForCausalLM",
        SIZES | HEADS | ONE | {"num_hidden_layers": 2, "vocab_size_per_layer_input": WORDS,
         "hidden_size_per_layer_input": 8, "laurel_rank": 4, "num_kv_shared_layers": 0,
         "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0, 0.0], "intermediate_size": [40, 40],
         "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3},
    ),
    "electra": ("ElectraForMaskedLM", SIZES | NO_DROPOUT | {"embedding_size": 12}),
    "layoutlm": ("LayoutLMForMaskedLM", SIZES | NO_DROPOUT | {"max_2d_position_embeddings": 32}),
    "mbart": ("MBartForConditionalGeneration", BART | ENDS),
    "whisper": (
        "WhisperForConditionalGeneration",
        BART | START | ENDS | {"num_mel_bins": 4, "max_source_positions": 6, "max_target_positions": 16},
    ),
    "siglip": ("SiglipForImageClassification", {"vision_config": SIZES | PIXELS} | LABELS),
    "phi": ("PhiForCausalLM", SIZES | ENDS | {"resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attention_dropout": 0.0}),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        SIZES | ENDS | ONE | {"residual_dropout": 0.0, "embedding_dropout": 0.0, "sliding_window": 4},
    ),
    "olmoe": ("OlmoeForCausalLM", SIZES | ENDS | ROUTED | {"num_experts": 3}),
    "nemotron": ("NemotronForCausalLM", SIZES | ENDS | ONE | HEADS),
    "phimoe": ("PhimoeForCausalLM", SIZES | ENDS | ROUTED | {"num_local_experts": 3,
        "router_jitter_noise": 0.0,
               "input_jitter_noise": 0.0}),
    "smollm3": ("SmolLM3ForCausalLM", SIZES | ENDS | ONE | {"num_hidden_layers": 4}),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        SIZES | ENDS | ONE | HEADS | {"mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_head": 12,
         "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 4},
    ),
    "lfm2": ("Lfm2ForCausalLM", SIZES | ENDS | ONE | {"layer_types": ["conv", "full_attention"],
             "block_auto_adjust_ff_dim": False}),
    "dbrx": ("DbrxForCausalLM", {"vocab_size": WORDS, "d_model": 24, "n_heads": 2, "n_layers": 2,
        "max_seq_len": 16,
             "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0},
             "ffn_config": {"ffn_hidden_size": 20, "moe_num_experts": 3, "moe_top_k": 2,
             "hidden_size": 24}}),
    "xlnet": ("XLNetLMHeadModel", {"vocab_size": WORDS, "d_model": 24, "n_layer": 2, "n_head": 2,
        "d_inner": 40,
              "dropout": 0.0}),
    "longformer": ("LongformerForMaskedLM", SIZES | NO_DROPOUT | ENDS | {"attention_window": 4,
                   "max_position_embeddings": 20}),
    "fnet": ("FNetForMaskedLM", SIZES | {"hidden_dropout_prob": 0.0, "tpu_short_seq_length": 9}),
    "led": ("LEDForConditionalGeneration", BART | START | ENDS | {"attention_window": 4,
            "max_encoder_position_embeddings": 16, "max_decoder_position_embeddings": 16}),
    "longt5": ("LongT5ForConditionalGeneration", {"vocab_size": WORDS, "d_model": 24, "d_kv": 12,
        "d_ff": 40,
               "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0, "pad_token_id": 0,
               "local_radius": 3} | START),
    "marian": ("MarianMTModel", BART | START | ENDS),
    "m2m_100": ("M2M100ForConditionalGeneration", BART | START | ENDS | {"attention_dropout": 0.0,
                "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}),
    "beit": ("BeitForImageClassification", SIZES | NO_DROPOUT | PIXELS | LABELS | {"drop_path_rate": 0.0}),
    "segformer": ("SegformerForImageClassification", {"num_channels": 1, "num_encoder_blocks": 2,
        "depths": [1, 1],
                  "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3], "strides": [2, 2],
                  "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "hidden_dropout_prob": 0.0,
                  "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0,
                  "drop_path_rate": 0.0,
                  "decoder_hidden_size": 16} | LABELS),
    "gptj": ("GPTJForCausalLM", {"vocab_size": WORDS, "n_embd": 24, "n_layer": 2, "n_head": 2,
        "rotary_dim": 4,
             "n_positions": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} | ENDS),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", {"vocab_size": WORDS, "n_embd": 24, "n_layer": 2, "n_head": 2,
                    "n_positions": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} | ENDS),
    "bert_generation": ("BertGenerationDecoder", SIZES | NO_DROPOUT | ENDS | {"is_decoder": True}),
}  # fmt: skip
KINDS = {
    "whisper": "speech",
    "xlnet": "masked",
    "marian": "seq2seq",
    "bert_generation": "causal",
}
"""Where the name of the class does not tell."""
