"""Flags of other trainers: the HINT that names the flag here. docs/migrate.md has the rest."""

from __future__ import annotations

import difflib
import re
import shlex

from fsdp.config.sections import FIELDS

VALUE = "VALUE"
"""In a hint: the typed value."""
_TYPE_PREFIX = re.compile(r"^(shardingstrategy|backwardprefetch|torch|distributedtype)\.")

_FULL, _DDP, _HSDP = "--mesh.strategy fsdp", "--mesh.strategy ddp", "--mesh.strategy hsdp"
_KEEP, _STEP = " --mesh.reshard_after_forward false", " --mesh.reshard_after_forward step"
_OFFLOAD = " --memory.cpu_offload true"
SHARDING = {
    _FULL: "full_shard 1 zero3 zero_3 zero-3 fsdp2 deepspeed deepspeed_stage_3 fsdp",
    _FULL + _KEEP: "shard_grad_op 2 zero2 zero_2 zero-2 deepspeed_stage_2",
    _FULL + _STEP: "zero1 zero_1 zero-1 deepspeed_stage_1",
    _FULL + _OFFLOAD: "deepspeed_stage_3_offload fsdp_cpu_offload",
    _FULL + _KEEP + _OFFLOAD: "deepspeed_stage_2_offload",
    _DDP: "no_shard 3 zero0 ddp ddp_spawn ddp_find_unused_parameters_true multi_gpu multi_cpu dp",
    _HSDP: "hybrid_shard 4 hsdp",
    _HSDP + _KEEP: "_hybrid_shard_zero2 hybrid_shard_zero2 5",
    "--mesh.strategy auto": "auto",
}
"""FSDP1's ShardingStrategy by name and number, ZeRO's stages, Lightning's strategies."""
_OF_SHARDING = {word: flags for flags, words in SHARDING.items() for word in words.split()}
_OF_STAGE = {"0": _DDP, "1": _FULL + _STEP, "2": _FULL + _KEEP, "3": _FULL}

LAUNCHER = "leave it out: the launcher makes the ranks, as in torchrun --nproc_per_node=2 train.py"
PER_RANK = "--train.micro_batch VALUE, --train.global_batch VALUE × ranks × accumulation: per rank elsewhere"
PIPELINE = "no counterpart: --mesh.shard, --mesh.tensor, --mesh.context and --mesh.expert divide a model here"
ALWAYS = "leave it out: FSDP2 always does so"
RAY = "python train.py --backend ray --ray.num_workers N, or train() in a worker of your own: docs/migrate.md"
HINTS = {
    "--train.global_batch VALUE": "train_batch_size global_batch_size train_batch",
    PER_RANK: "batch_size",
    "--train.micro_batch VALUE": "per_device_train_batch_size micro_batch_size local_batch_size "
    "train_micro_batch_size_per_gpu mbs",
    "--train.eval_batch VALUE": "per_device_eval_batch_size eval_batch_size val_batch_size",
    "leave it out: micro-batches follow from --train.global_batch and --train.micro_batch":
        "gradient_accumulation_steps accumulate_grad_batches grad_accum",
    "--train.epochs VALUE": "num_epochs num_train_epochs max_epochs epochs",
    "--train.steps VALUE": "max_steps num_steps train_steps max_train_steps max_iters training_steps",
    "--train.clip_grad_norm VALUE": "max_grad_norm max_norm gradient_clip_val clip_grad grad_clip "
    "gradient_clipping",
    "--train.eval_every_steps VALUE": "eval_steps eval_interval val_check_interval eval_every",
    "--mesh.reshard_after_forward VALUE": "reshard_after_forward fsdp_reshard_after_forward",
    "--mesh.replicate VALUE": "data_parallel_replicate_degree dp_replicate num_replicas dp_replicate_size",
    "--mesh.shard VALUE": "data_parallel_shard_degree dp_shard dp_shard_size",
    "no counterpart: frozen weights in half the bytes are --precision.frozen bf16 with --lora.rank 8":
        "qlora load_in_4bit load_in_8bit",
    PIPELINE: "pipeline_parallel_degree pp_size pipeline",
    "--mesh.tensor VALUE": "tensor_parallel_degree tp_size tensor_parallel autotp_size",
    "--mesh.context VALUE": "context_parallel_degree cp_size sequence_parallel_size sp_size",
    "--mesh.expert VALUE": "ep_size expert_parallel_degree expert_parallel_size",
    "--mesh.wrap class:VALUE": "transformer_layer_cls_to_wrap fsdp_transformer_layer_cls_to_wrap",
    "--mesh.wrap size:VALUE": "min_num_params fsdp_min_num_params",
    "--mesh.wrap auto": "auto_wrap_policy fsdp_auto_wrap_policy",
    "--speed.prefetch_backward 1": "backward_prefetch fsdp_backward_prefetch",
    "--speed.prefetch_forward 1": "forward_prefetch fsdp_forward_prefetch",
    ALWAYS: "use_orig_params fsdp_use_orig_params sync_module_states limit_all_gathers fsdp_version "
    "find_unused_parameters fsdp_cpu_ram_efficient_loading low_cpu_mem_usage overlap_comm "
    "contiguous_gradients allgather_partitions reduce_scatter sub_group_size stage3_max_live_parameters "
    "stage3_max_reuse_distance stage3_prefetch_bucket_size stage3_param_persistence_threshold "
    "stage3_gather_16bit_weights_on_model_save",
    RAY: "use_gpu scaling_config scalingconfig resources_per_worker trainer_resources placement_strategy "
    "train_loop_config train_loop_per_worker torch_config datasets",
    "docs/migrate.md": "deepspeed deepspeed_config zero_optimization run_config fsdp_config trainer",
    "--precision.param VALUE": "mixed_precision precision dtype torch_dtype amp param_dtype "
    "mixed_precision_param",
    "--precision.param bf16": "bf16 bf16.enabled bfloat16.enabled",
    "--precision.param fp16": "fp16 fp16.enabled",
    "--precision.reduce VALUE": "reduce_dtype mixed_precision_reduce",
    "--run.matmul_precision high": "tf32",
    "--memory.activation_checkpointing full": "activation_checkpointing gradient_checkpointing "
    "fsdp_activation_checkpointing activation_checkpoint",
    "--memory.activation_checkpointing full --memory.activation_offload true": "activation_offload",
    "--memory.cpu_offload true": "cpu_offload enable_cpu_offload offload_params fsdp_offload_params "
    "offload_param offload_param.device",
    "--memory.optimizer_offload true": "offload_optimizer offload_optimizer.device",
    "--memory.nvme optimizer --memory.nvme_dir VALUE": "nvme_path",
    "--speed.compile true": "torch_compile compile compile.enable dynamo_backend",
    "--speed.float8 tensorwise": "fp8 enable_fp8_linear",
    "--speed.attention flash": "attn_implementation use_flash_attention flash_attention",
    "--optim.lr VALUE": "learning_rate max_lr params.lr",
    "--optim.name VALUE": "optimizer optim optimizer_name optimizer.type",
    "--optim.weight_decay VALUE": "wd",
    "--optim.beta1 VALUE": "adam_beta1",
    "--optim.beta2 VALUE": "adam_beta2",
    "--optim.beta1 0.9 --optim.beta2 0.95": "betas adam_betas",
    "--optim.eps VALUE": "adam_epsilon adam_eps",
    "--optim.schedule VALUE": "lr_scheduler lr_scheduler_type scheduler scheduler.type",
    "--optim.warmup_steps VALUE": "warmup num_warmup_steps lr_warmup_steps warmup_iters",
    "--optim.warmup_steps N, the ratio times the steps": "warmup_ratio",
    "--optim.min_lr_ratio R, the final rate as a fraction of --optim.lr": "min_lr",
    "--data.workers VALUE": "num_workers dataloader_num_workers",
    "--run.seed VALUE": "data_seed seed random_seed",
    "--data.seq_len VALUE": "seq_length max_seq_length max_seq_len block_size max_length sequence_len",
    "--data.name VALUE": "dataset dataset_name train_file",
    "--data.dir VALUE": "data_dir dataset_path data_path",
    "--data.tokenizer VALUE": "tokenizer_name tokenizer_name_or_path tokenizer_path",
    "--model.name VALUE": "model",
    "--model.name hf:VALUE": "model_name_or_path model_name pretrained_model_name_or_path base_model",
    "--lora.rank VALUE": "lora_r lora_rank",
    "--lora.alpha VALUE": "lora_alpha",
    "--lora.targets VALUE": "target_modules lora_target_modules",
    "--run.dir VALUE": "output_dir out_dir save_dir default_root_dir storage_path dump_folder",
    "--run.dir runs/VALUE": "experiment.name experiment_name run_name job_name",
    "--run.log_every_steps VALUE": "logging_steps log_every_n_steps log_interval log_freq steps_per_print",
    "--run.wandb shardrun": "report_to wandb use_wandb",
    "--run.wandb VALUE": "wandb_project",
    "--checkpoint.every_steps VALUE": "save_steps save_interval checkpoint_interval every_n_train_steps "
    "checkpoint.interval checkpoint_frequency",
    "--checkpoint.keep_last VALUE": "save_total_limit total_limit keep_latest_k num_to_keep",
    "--checkpoint.keep_best VALUE": "save_top_k",
    "--checkpoint.resume VALUE": "resume resume_from_checkpoint ckpt_path load_checkpoint",
    "--watch.deterministic true": "deterministic full_determinism",
    "--profile.trace true": "enable_profiling profiler wall_clock_breakdown",
    "--ray.max_failures VALUE": "max_failures failure_config",
    "--run.process_group_timeout_s VALUE": "ddp_timeout",
    "--run.device cpu": "use_cpu no_cuda cpu",
    "--run.device VALUE": "device",
    LAUNCHER: "local_rank rank world_size node_rank master_addr master_port nproc_per_node nnodes "
    "num_processes num_machines num_nodes devices gpus num_gpus gpus_per_node",
}  # fmt: skip
"""Hint → the names, in other trainers, that it answers."""
_OF_NAME = {name: hint for hint, names in HINTS.items() for name in names.split()}
_SHARDING_NAMES = ("sharding_strategy", "fsdp_sharding_strategy", "fsdp", "strategy", "distributed_type")
_STAGE_NAMES = ("zero_stage", "stage", "zero")


def hint_for(name: str, value: str) -> str | None:
    """Our flags for another trainer's setting, or why there is none; None if it is unknown."""
    path = name.lower().split(".")
    name = path[-1]
    if name in _SHARDING_NAMES:
        return sharding(value) or _FULL
    if name in _STAGE_NAMES:
        return _OF_STAGE.get(value, _FULL)
    value = value.removesuffix("-mixed")  # Lightning's bf16-mixed
    hint = _OF_NAME.get(".".join(path[-2:]), _OF_NAME.get(name))
    if hint is None or not (is_flags(hint) or value.isdecimal()):  # prose: no parser mends a wrong value
        return hint
    return hint.replace(VALUE, shlex.quote(value or VALUE))


def sharding(word: str) -> str | None:
    """Our flags for a sharding strategy of another trainer."""
    return _OF_SHARDING.get(_TYPE_PREFIX.sub("", word.lower()))


def nearest_flags(name: str) -> list[str]:
    """Our flags of which this may be a misspelling, or that it names without their section.

    Of another trainer's section (`experiment.name`) the field alone says nothing, unless it is a compound.
    """
    sections = {field.partition(".")[0] for field in FIELDS if "." in field}
    section, _, key = name.rpartition(".")
    if not section and name.partition("_")[0] in sections:
        section, _, key = name.partition("_")
    meant = difflib.get_close_matches(section, sections, n=1, cutoff=0.7)
    other = [f for f in FIELDS if not section or section in sections or "_" in f]
    elsewhere = 1.0 if section in sections else 0.87
    for fields, cutoff in (([f for f in FIELDS if f.partition(".")[0] in meant], 0.65), (other, elsewhere)):
        tails = [field.rpartition(".")[2] for field in fields]
        if close := difflib.get_close_matches(key, tails, n=1, cutoff=cutoff):
            near = [field for field, tail in zip(fields, tails, strict=True) if tail == close[0]]
            common = [field for field in near if FIELDS[field].meta["common"]]
            return [f"--{field}" for field in common or near]
    return []


def is_flags(hint: str) -> bool:
    """Whether the hint is flags with their values, which can be typed."""
    words = hint.split()
    return bool(words) and len(words) % 2 == 0 and all(word.startswith("--") for word in words[::2])
