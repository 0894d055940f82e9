"""Names of other trainers' flags → flags of this one, for the hint on an unknown flag.

The table is searched before similar spellings. docs/migrate.md prints the same table;
tests/config/test_aliases.py compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

VALUE = "{}"
"""Stands for the typed value."""


@dataclass(frozen=True)
class Alias:
    """`flags`, with {} for the typed value, replace `names`; `values` holds exceptions for certain values."""

    names: str
    flags: str
    values: Mapping[str, str] = field(default_factory=dict)

    def hint(self, value: str) -> str:
        plain = value.lower().removeprefix("shardingstrategy.").removeprefix("torch.")
        return self.values.get(plain or "true", self.flags.replace(VALUE, value))


_PRECISION = {
    "true": "--precision.param bf16",
    "bf16": "--precision.param bf16",
    "bfloat16": "--precision.param bf16",
    "bf16-mixed": "--precision.param bf16",
    "bf16-true": "--precision.param bf16",
    "16-mixed": "--precision.param fp16",
    "fp16": "--precision.param fp16",
    "float16": "--precision.param fp16",
    "no": "--precision.param fp32",
    "fp32": "--precision.param fp32",
    "float32": "--precision.param fp32",
    "32": "--precision.param fp32",
    "32-true": "--precision.param fp32",
    "fp8": "--speed.float8 tensorwise",
    "false": "--precision.param fp32",
}
SHARDING = {
    "full_shard": "--mesh.strategy fsdp",
    "1": "--mesh.strategy fsdp",
    "zero3": "--mesh.strategy fsdp",
    "shard_grad_op": "--mesh.strategy fsdp --mesh.reshard_after_forward false",
    "2": "--mesh.strategy fsdp --mesh.reshard_after_forward false",
    "zero2": "--mesh.strategy fsdp --mesh.reshard_after_forward false",
    "zero1": "--mesh.strategy fsdp --mesh.reshard_after_forward step",
    "no_shard": "--mesh.strategy ddp",
    "3": "--mesh.strategy ddp",
    "zero0": "--mesh.strategy ddp",
    "hybrid_shard": "--mesh.strategy hsdp",
    "4": "--mesh.strategy hsdp",
    "_hybrid_shard_zero2": "--mesh.strategy hsdp --mesh.reshard_after_forward false",
    "hybrid_shard_zero2": "--mesh.strategy hsdp --mesh.reshard_after_forward false",
    "fsdp2": "--mesh.strategy fsdp",
    "5": "--mesh.strategy hsdp --mesh.reshard_after_forward false",
    "deepspeed": "--mesh.strategy fsdp",
}
"""FSDP1's ShardingStrategy by name and number, and the names of ZeRO's stages."""
_STAGE = {
    "0": "--mesh.strategy ddp",
    "1": "--mesh.strategy fsdp --mesh.reshard_after_forward step",
    "2": "--mesh.strategy fsdp --mesh.reshard_after_forward false",
    "3": "--mesh.strategy fsdp",
}
_RESHARD = {name: flags for name, flags in SHARDING.items() if not name.isdigit()} | {
    "true": "--mesh.reshard_after_forward true",
    "always": "--mesh.reshard_after_forward true",
    "false": "--mesh.reshard_after_forward false",
    "never": "--mesh.reshard_after_forward false",
}
_FULL = {"false": "--memory.activation_checkpointing none", "none": "--memory.activation_checkpointing none"}
_FULL |= {"selective": "--memory.activation_checkpointing ops"}
_WANDB = {"wandb": "--run.wandb true", "none": "--run.wandb false", "false": "--run.wandb false"}
_COUNT = "leave it out: the launcher makes the ranks, as in torchrun --nproc_per_node=2 train.py"

ALIASES = (
    # how much and how long
    Alias("batch_size train_batch_size global_batch_size train_batch", "--train.global_batch {}"),
    Alias(
        "per_device_train_batch_size per_gpu_train_batch_size micro_batch_size local_batch_size mbs "
        "train_micro_batch_size_per_gpu",
        "--train.micro_batch {}",
    ),
    Alias(
        "gradient_accumulation_steps accumulate_grad_batches grad_accum grad_accumulation",
        "leave it out: micro-batches follow from --train.global_batch and --train.micro_batch",
    ),
    Alias("per_device_eval_batch_size eval_batch_size val_batch_size", "--train.eval_batch {}"),
    Alias("num_epochs num_train_epochs max_epochs", "--train.epochs {}"),
    Alias("max_steps num_steps train_steps max_train_steps max_iters training_steps", "--train.steps {}"),
    Alias(
        "max_grad_norm gradient_clip_val clip_grad gradient_clipping max_norm", "--train.clip_grad_norm {}"
    ),
    Alias(
        "eval_steps eval_interval val_check_interval eval_every validation_freq",
        "--train.eval_every_steps {}",
    ),
    # sharding
    Alias(
        "sharding_strategy fsdp_sharding_strategy fsdp strategy dp_strategy distributed_type",
        "--mesh.strategy {}",
        {
            **SHARDING,
            "true": "--mesh.strategy fsdp",
            "hsdp": "--mesh.strategy hsdp",
            "ddp": "--mesh.strategy ddp",
        },
    ),
    Alias("zero_stage stage zero zero_optimization", "--mesh.strategy fsdp", _STAGE),
    Alias("reshard_after_forward fsdp_reshard_after_forward", "--mesh.reshard_after_forward {}", _RESHARD),
    Alias("data_parallel_replicate_degree dp_replicate replicate_degree num_replicas", "--mesh.replicate {}"),
    Alias("data_parallel_shard_degree dp_shard shard_degree dp_degree", "--mesh.shard {}"),
    Alias(
        "transformer_layer_cls_to_wrap fsdp_transformer_layer_cls_to_wrap transformer_layer_cls",
        "--mesh.wrap class:{}",
    ),
    Alias("min_num_params fsdp_min_num_params size_based_auto_wrap_policy", "--mesh.wrap size:{}"),
    Alias("auto_wrap_policy fsdp_auto_wrap_policy", "--mesh.wrap auto"),
    Alias("backward_prefetch fsdp_backward_prefetch", "--speed.prefetch_backward 1"),
    Alias("forward_prefetch fsdp_forward_prefetch", "--speed.prefetch_forward 1"),
    Alias(
        "use_orig_params fsdp_use_orig_params sync_module_states fsdp_sync_module_states limit_all_gathers "
        "fsdp_version",
        "leave it out: FSDP2 always does so",
    ),
    # memory and precision
    Alias(
        "mixed_precision precision dtype torch_dtype bf16 amp param_dtype mixed_precision_param",
        "--precision.param {}",
        _PRECISION,
    ),
    Alias("fp16", "--precision.param fp16", {"false": "--precision.param fp32"}),
    Alias(
        "reduce_dtype mixed_precision_reduce",
        "--precision.reduce {}",
        {name: flags.replace(".param", ".reduce") for name, flags in _PRECISION.items()},
    ),
    Alias("tf32", "--run.matmul_precision high", {"false": "--run.matmul_precision highest"}),
    Alias(
        "activation_checkpointing gradient_checkpointing fsdp_activation_checkpointing activation_checkpoint",
        "--memory.activation_checkpointing full",
        _FULL,
    ),
    Alias(
        "cpu_offload offload_params fsdp_offload_params offload offload_optimizer",
        "--memory.cpu_offload true",
        {"false": "--memory.cpu_offload false", "none": "--memory.cpu_offload false"},
    ),
    Alias("torch_compile", "--speed.compile true", {"false": "--speed.compile false"}),
    Alias("fp8 enable_fp8_linear", "--speed.float8 tensorwise"),
    # optimizer
    Alias("learning_rate", "--optim.lr {}"),
    Alias(
        "optimizer optim optimizer_name",
        "--optim.name {}",
        {
            "adamw_torch": "--optim.name adamw",
            "adamw_torch_fused": "--optim.name adamw --optim.fused true",
            "adamw_8bit": "--optim.name adamw --optim.state 8bit",
            "adamw_bnb_8bit": "--optim.name adamw --optim.state 8bit",
        },
    ),
    Alias("wd", "--optim.weight_decay {}"),
    Alias("adam_beta1", "--optim.beta1 {}"),
    Alias("adam_beta2", "--optim.beta2 {}"),
    Alias("adam_epsilon adam_eps", "--optim.eps {}"),
    Alias("lr_scheduler lr_scheduler_type scheduler", "--optim.schedule {}"),
    Alias("warmup num_warmup_steps lr_warmup_steps warmup_iters", "--optim.warmup_steps {}"),
    Alias("warmup_ratio", "--optim.warmup_steps 100"),
    Alias("min_lr_factor", "--optim.min_lr_ratio {}"),
    # data and model
    Alias("num_workers dataloader_num_workers", "--data.workers {}"),
    Alias("prefetch_factor dataloader_prefetch_factor", "--data.prefetch {}"),
    Alias("seq_length max_seq_length max_seq_len block_size max_length sequence_length", "--data.seq_len {}"),
    Alias("dataset dataset_name", "--data.name {}"),
    Alias("data_dir dataset_path data_path data", "--data.dir {}"),
    Alias("model model_name", "--model.name {}"),
    Alias("model_name_or_path weights pretrained init_from", "--model.weights {}"),
    Alias("lora_r lora_rank", "--lora.rank {}"),
    Alias("lora_alpha", "--lora.alpha {}"),
    Alias("lora_dropout", "--lora.dropout {}"),
    Alias("target_modules lora_target_modules", "--lora.targets {}"),
    # the run
    Alias("random_seed", "--run.seed {}"),
    Alias("output_dir out_dir save_dir default_root_dir work_dir dump_folder project_dir", "--run.dir {}"),
    Alias("logging_dir log_dir tensorboard_dir", "--run.dir {}"),
    Alias("logging_steps log_every_n_steps log_interval log_freq log_every", "--run.log_every_steps {}"),
    Alias("report_to wandb use_wandb", "--run.wandb true", _WANDB),
    Alias(
        "save_steps save_interval checkpointing_steps checkpoint_interval every_n_train_steps save_every",
        "--checkpoint.every_steps {}",
    ),
    Alias("save_total_limit total_limit keep_latest_k max_to_keep", "--checkpoint.keep_last {}"),
    Alias("save_top_k", "--checkpoint.keep_best {}"),
    Alias(
        "resume resume_from_checkpoint ckpt_path load_checkpoint resume_from",
        "--checkpoint.resume {}",
        {
            "true": "--checkpoint.resume auto",
            "false": "--checkpoint.resume never",
            "last": "--checkpoint.resume auto",
        },
    ),
    Alias("local_rank rank world_size node_rank master_addr master_port", _COUNT),
    Alias(
        "nproc_per_node nnodes num_processes num_machines num_nodes devices gpus n_gpus accelerator", _COUNT
    ),
    Alias("num_gpus gpus_per_node", _COUNT),
)

_BY_NAME = {name: alias for alias in ALIASES for name in alias.names.split()}


def hint_for(name: str, value: str) -> str | None:
    """Returns our flags for another trainer's flag, with or without its section; None if it is unknown."""

    alias = _BY_NAME.get(name.rpartition(".")[2].lower())
    return alias.hint(value) if alias is not None else None
