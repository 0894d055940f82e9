"""Settings of nanoGPT, torchtune, Axolotl and trl, and sizes of models, and their flags here, as rows.

Not here: FSDP1, transformers, Accelerate, Lightning, DeepSpeed and torchtitan (alias_table.py), the search in
the rows (aliases.py).
"""

from __future__ import annotations

from fsdp.config.alias_table import QUANTIZED, Alias

_SIZE = "--model.args.{name} {{}}, with --model.name transformer or vit"
_FLASH = "--speed.attention flash"
_ADAPTED = "leave it out: adapters are in every linear layer of the blocks unless --lora.targets names some"

MODELS: tuple[Alias, ...] = (
    Alias("n_layer n_layers num_layers num_hidden_layers", _SIZE.format(name="layers")),
    Alias("n_head n_heads num_heads num_attention_heads", _SIZE.format(name="heads")),
    Alias(
        "n_kv_heads num_kv_heads num_key_value_heads",
        "--model.args.kv_heads {}, with --model.name transformer",
    ),
    Alias("n_embd d_model hidden_size embed_dim", _SIZE.format(name="width")),
    Alias("intermediate_size d_ff ffn_dim", _SIZE.format(name="ffn")),
    Alias("vocab_size", "--model.args.vocab_size {}, with --model.name transformer"),
    Alias(
        "dropout hidden_dropout",
        "--model.args.dropout {}, with --model.name transformer or vit; adapters have --lora.dropout",
    ),
    Alias("context_length context_len sequence_len seqlen", "--data.seq_len {}"),
    Alias(
        "packing sample_packing dataset.packed",
        "--data.args.rows packed, where --data.name is a file or folder of documents",
        {"false": "--data.args.rows document, where --data.name is a file or folder of documents"},
    ),
    Alias("pad_to_sequence_len pad_to_max_length", "leave it out: every row has --data.seq_len tokens"),
    Alias("val_set_size", "--data.args.heldout {}, where --data.name is a file or folder of documents"),
    Alias("datasets", "--data.name {}, or --data.sources FILE.toml for several"),
    Alias("base_model", "--model.name hf:{}"),
    Alias(
        "init_from",
        "--model.weights {}",
        {
            "resume": "--checkpoint.resume auto",
            "scratch": "leave it out: weights are drawn from --run.seed",
            "gpt2": "--model.name hf:gpt2",
            "gpt2-medium": "--model.name hf:gpt2-medium",
            "gpt2-large": "--model.name hf:gpt2-large",
            "gpt2-xl": "--model.name hf:gpt2-xl",
        },
    ),
    Alias("adapter", "--lora.rank 16", {"qlora": QUANTIZED, "none": "leave it out"}),
    Alias(
        "load_in_4bit load_in_8bit quantization_config qlora quantize", QUANTIZED, {"false": "leave it out"}
    ),
    Alias("lora_target_linear", _ADAPTED),
    Alias(
        "attn_implementation flash_attention use_flash_attention use_flash_attn",
        "--speed.attention {}",
        {
            "true": _FLASH, "flash_attention_2": _FLASH, "flash_attention_3": _FLASH,
            "false": "--speed.attention auto", "sdpa": "--speed.attention auto",
            "eager": "--speed.attention math",
        },
    ),
    Alias("sdp_attention xformers_attention", "--speed.attention auto"),
    Alias("trust_remote_code", "leave it out: code that a model's folder brings is never run"),
    Alias(
        "hf_token use_auth_token",
        "leave it out: nothing is downloaded; --model.name hf:FOLDER reads a folder",
    ),
    Alias("optimizer_in_bwd", "no counterpart: the update follows the whole backward"),
    Alias(
        "enable_activation_checkpointing",
        "--memory.activation_checkpointing full",
        {"false": "--memory.activation_checkpointing none"},
    ),
    Alias(
        "custom_sharded_layers",
        "--mesh.wrap class:NAME, the class of the layers that become units",
    ),
    Alias("lr_decay_iters", "leave it out: the schedule ends with the run, --train.steps"),
    Alias("ema_decay use_ema", "--optim.ema {}", {"true": "--optim.ema 0.999", "false": "--optim.ema 0"}),
    Alias("decay_lr", "--optim.schedule cosine", {"false": "--optim.schedule constant"}),
    Alias("always_save_checkpoint", "leave it out: --checkpoint.every_steps and --checkpoint.keep_last"),
    Alias("saves_per_epoch", "--checkpoint.every_steps N, counted in optimizer steps"),
    Alias("evals_per_epoch", "--train.eval_every_steps N, or --train.eval_every_epochs 1"),
    Alias("max_steps_per_epoch", "--train.steps N, counted in optimizer steps"),
    Alias("wandb_entity", "leave it out: export WANDB_ENTITY={}, which wandb reads itself"),
    Alias("wandb_run_name wandb_name", "leave it out: export WANDB_NAME={}, which wandb reads itself"),
    Alias("zero3 zero_3", "--mesh.strategy fsdp", {"false": "leave it out"}),
    Alias(
        "zero2 zero_2",
        "--mesh.strategy fsdp --mesh.reshard_after_forward false",
        {"false": "leave it out"},
    ),
    Alias(
        "zero1 zero_1", "--mesh.strategy fsdp --mesh.reshard_after_forward step", {"false": "leave it out"}
    ),
    Alias(
        "fsdp_config",
        "python -m fsdp.config migrate FILE, a YAML or JSON of all TrainingArguments with it",
    ),
)  # fmt: skip
