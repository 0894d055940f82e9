"""The settings of other trainers and their flags here, as rows: FSDP1, transformers, Accelerate, Lightning,
DeepSpeed, torchtitan.

A name may carry its section, as in `optimizer.params.lr`, where the bare word means something else; `NAME.*`
covers a whole section. Not here: the search in these rows (aliases.py), files of other trainers
(foreign_files.py).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

VALUE = "{}"
"""Stands for the typed value; {0} and {1} for the first and second item of a list."""


@dataclass(frozen=True)
class Alias:
    """`flags`, with {} for the typed value, replace `names`; `values` holds exceptions for certain values.

    Text that does not begin with -- is the reason why there is no flag.
    """

    names: str
    flags: str
    values: Mapping[str, str] = field(default_factory=dict)

    def hint(self, value: str) -> str:
        text = self.values.get(_key(value), self.flags)
        for at, item in enumerate(re.split(r"[,\s]+", value.strip("[]() "))):
            text = text.replace(f"{{{at}}}", item or "VALUE")
        return text.replace(VALUE, shlex.quote(value or "VALUE"))

    def is_exception(self, value: str) -> bool:
        return _key(value) in self.values


def _key(value: str) -> str:
    """A flag without a value is `true`."""
    return (
        re.sub(r"^(shardingstrategy|backwardprefetch|torch|distributedtype)\.", "", value.lower()) or "true"
    )


_BF16, _FP16, _FP32 = (f"--precision.param {dtype}" for dtype in ("bf16", "fp16", "fp32"))
_PRECISION = {
    "true": _BF16, "bf16": _BF16, "bfloat16": _BF16, "bf16-mixed": _BF16,
    "bf16-true": "--precision.master bf16",
    "16-mixed": _FP16, "16": _FP16, "fp16": _FP16, "float16": _FP16, "half": _FP16, "16-true": _FP16,
    "no": _FP32, "fp32": _FP32, "float32": _FP32, "32": _FP32, "32-true": _FP32, "false": _FP32,
    "fp8": "--speed.float8 tensorwise", "transformer-engine": "--speed.float8 tensorwise",
    "64": "--precision.master fp64", "64-true": "--precision.master fp64", "fp64": "--precision.master fp64",
}  # fmt: skip
_REDUCE = {
    name: flags.replace(".param", ".reduce")
    for name, flags in _PRECISION.items()
    if flags.startswith("--precision.param")
}
_FSDP, _DDP, _HSDP = (f"--mesh.strategy {name}" for name in ("fsdp", "ddp", "hsdp"))
_KEPT = " --mesh.reshard_after_forward false"
SHARDING = {
    "full_shard": _FSDP, "1": _FSDP, "zero3": _FSDP, "zero_3": _FSDP, "zero-3": _FSDP, "fsdp2": _FSDP,
    "shard_grad_op": _FSDP + _KEPT, "2": _FSDP + _KEPT, "zero2": _FSDP + _KEPT, "zero_2": _FSDP + _KEPT,
    "zero-2": _FSDP + _KEPT,
    "zero1": f"{_FSDP} --mesh.reshard_after_forward step",
    "zero_1": f"{_FSDP} --mesh.reshard_after_forward step",
    "zero-1": f"{_FSDP} --mesh.reshard_after_forward step",
    "no_shard": _DDP, "3": _DDP, "zero0": _DDP,
    "hybrid_shard": _HSDP, "4": _HSDP,
    "_hybrid_shard_zero2": _HSDP + _KEPT, "hybrid_shard_zero2": _HSDP + _KEPT, "5": _HSDP + _KEPT,
    "deepspeed": _FSDP, "deepspeed_stage_1": f"{_FSDP} --mesh.reshard_after_forward step",
    "deepspeed_stage_2": _FSDP + _KEPT, "deepspeed_stage_3": _FSDP,
    "deepspeed_stage_2_offload": f"{_FSDP + _KEPT} --memory.cpu_offload true",
    "deepspeed_stage_3_offload": f"{_FSDP} --memory.cpu_offload true",
    "fsdp_cpu_offload": f"{_FSDP} --memory.cpu_offload true",
}  # fmt: skip
"""FSDP1's ShardingStrategy by name and number, the names of ZeRO's stages and of Lightning's strategies."""
_PLAIN_DDP = ("ddp", "ddp_spawn", "ddp_find_unused_parameters_true", "multi_gpu", "multi_cpu", "no", "dp")
_STAGE = {
    "0": _DDP, "1": f"{_FSDP} --mesh.reshard_after_forward step", "2": _FSDP + _KEPT, "3": _FSDP,
}  # fmt: skip
_RESHARD = {name: flags for name, flags in SHARDING.items() if not name.isdigit()} | {
    "true": "--mesh.reshard_after_forward true",
    "always": "--mesh.reshard_after_forward true",
    "default": "--mesh.reshard_after_forward true",
    "false": "--mesh.reshard_after_forward false",
    "never": "--mesh.reshard_after_forward false",
}
_RECOMPUTE = "--memory.activation_checkpointing "
RECOMPUTED = {
    "false": _RECOMPUTE + "none", "none": _RECOMPUTE + "none", "selective": _RECOMPUTE + "ops",
    "memory_budget": "--memory.activation_budget 0.5",
}  # fmt: skip
_OFFLOAD = "--memory.cpu_offload true"
_KEPT_ON_GPU = {"false": "--memory.cpu_offload false", "none": "--memory.cpu_offload false"}
_COMPILE = {"false": "--speed.compile false", "no": "--speed.compile false"}
_OPTIMIZERS = {
    "adamw_torch": "--optim.name adamw",
    "adamw_hf": "--optim.name adamw",
    "adamw_torch_fused": "--optim.name adamw --optim.fused true",
    "adamw_apex_fused": "--optim.name adamw --optim.fused true",
    "fusedadam": "--optim.name adamw --optim.fused true",
    "adamw_8bit": "--optim.name adamw --optim.state 8bit",
    "adamw_bnb_8bit": "--optim.name adamw --optim.state 8bit",
    "paged_adamw_8bit": "--optim.name adamw --optim.state 8bit",
    "adamw": "--optim.name adamw",
    "adam": "--optim.name adam",
    "sgd": "--optim.name sgd",
}
NO_COUNTERPART = "no counterpart"
"""How a reason begins if nothing here does what the name did."""
NOTHING_HERE = f"{NO_COUNTERPART}: leave it out"
_OWN_OPTIMIZER = "--optim.name package.module:factory, with an optimizer of your own"
_OPTIMIZERS |= dict.fromkeys(
    ("adafactor", "lion_32bit", "lion", "lamb", "adagrad", "rmsprop", "onebitadam", "zerooneadam"),
    f"no counterpart: {_OWN_OPTIMIZER}",
)
_OWN_SCHEDULE = "no counterpart: --optim.schedule package.module:function, with a schedule of your own"
SCHEDULES = {
    "constant": "--optim.schedule constant --optim.warmup_steps 0",
    "constant_with_warmup": "--optim.schedule constant", "warmuplr": "--optim.schedule constant",
    "warmupdecaylr": "--optim.schedule linear", "warmupcosinelr": "--optim.schedule cosine",
    "cosine_with_min_lr": "--optim.schedule cosine", "cosine_warmup_with_min_lr": "--optim.schedule cosine",
    "warmup_stable_decay": "--optim.schedule wsd",
    "polynomial": "--optim.schedule linear",
    "cosine_with_restarts": _OWN_SCHEDULE, "inverse_sqrt": _OWN_SCHEDULE, "onecycle": _OWN_SCHEDULE,
    "reduce_lr_on_plateau": _OWN_SCHEDULE, "lrrangetest": _OWN_SCHEDULE, "greedy": _OWN_SCHEDULE,
}  # fmt: skip
_NO_WANDB = "leave it out: nothing is sent anywhere unless --run.wandb names a project"
_WANDB = {
    "wandb": "--run.wandb shardrun", "true": "--run.wandb shardrun", "all": "--run.wandb shardrun",
    "none": _NO_WANDB, "false": _NO_WANDB, "[]": _NO_WANDB,
    "tensorboard": "leave it out: TensorBoard's files are always written, into RUN/tensorboard",
}  # fmt: skip
LAUNCHED = "leave it out: the launcher makes the ranks, as in torchrun --nproc_per_node=2 train.py"
_RESTARTS = "leave it out: a flag of the launcher, as in torchrun --max-restarts=3 train.py"
DATA_PARALLEL = "no counterpart: ranks are data-parallel, on the axes --mesh.replicate and --mesh.shard"
_TOKENS = "--data.name FOLDER: python -m fsdp.tokenize writes a text corpus there once"
_SIZED = "leave it out: FSDP2 has no buckets; the size of a message is that of a unit, --mesh.wrap"
QUANTIZED = "no counterpart: frozen weights in half the bytes are --precision.frozen bf16"
ALWAYS = "leave it out: FSDP2 always does so"
_HUB = "no counterpart: nothing is uploaded; RUN/full_model is a folder to upload"
_SAVED_WHOLE = "leave it out: sharded checkpoints, and at the end RUN/full_model for --checkpoint.export true"
_IN_RUN = "leave it out: it is written into the run directory, --run.dir"

GROUPS: Mapping[str, tuple[Alias, ...]] = {
    "Length and batch": (
        Alias(
            "batch_size train_batch_size global_batch_size train_batch",
            "--train.global_batch {}",
            {"-1": "leave it out: --train.global_batch is set by itself, --train.micro_batch below it"},
        ),
        Alias(
            "per_device_train_batch_size per_gpu_train_batch_size micro_batch_size local_batch_size "
            "mbs train_micro_batch_size_per_gpu",
            "--train.micro_batch {}",
        ),
        Alias(
            "gradient_accumulation_steps accumulate_grad_batches grad_accum grad_accumulation",
            "leave it out: micro-batches follow from --train.global_batch and --train.micro_batch",
        ),
        Alias(
            "per_device_eval_batch_size per_gpu_eval_batch_size eval_batch_size val_batch_size",
            "--train.eval_batch {}",
        ),
        Alias("num_epochs num_train_epochs max_epochs epochs", "--train.epochs {}"),
        Alias(
            "max_steps num_steps train_steps max_train_steps max_iters training_steps training.steps",
            "--train.steps {}",
            {"-1": "leave it out: --train.epochs, or the data set's default length"},
        ),
        Alias(
            "min_epochs min_steps", "no counterpart: a run has one length, --train.steps or --train.epochs"
        ),
        Alias("max_time", "--stop.deadline_s SECONDS, after which the run saves and stops"),
        Alias("fast_dev_run", "--train.steps {}", {"true": "--train.steps 1", "false": "leave it out"}),
        Alias("limit_train_batches overfit_batches", "--train.steps N, counted in optimizer steps"),
        Alias(
            "max_grad_norm gradient_clip_val clip_grad grad_clip gradient_clipping max_norm",
            "--train.clip_grad_norm {}",
        ),
        Alias(
            "gradient_clip_algorithm",
            "leave it out: gradients are clipped to the global norm --train.clip_grad_norm",
            {"value": "no counterpart: gradients are clipped by norm, --train.clip_grad_norm"},
        ),
        Alias(
            "eval_steps eval_interval val_check_interval eval_every val_every validation_freq "
            "validation.freq",
            "--train.eval_every_steps {}",
        ),
        Alias(
            "eval_strategy evaluation_strategy validation.enabled validation.enable do_eval",
            "--train.eval_every_steps 100",
            {
                "no": "--train.eval_every_steps 0",
                "false": "--train.eval_every_steps 0",
                "epoch": "--train.eval_every_epochs 1",
            },
        ),
        Alias(
            "limit_val_batches eval_iters validation.steps",
            "--train.eval_samples N, counted in samples",
            {"-1": "--train.eval_samples 0"},
        ),
        Alias("max_eval_samples", "--train.eval_samples {}"),
        Alias("check_val_every_n_epoch", "--train.eval_every_epochs {}"),
        Alias(
            "eval_delay eval_on_start num_sanity_val_steps",
            "leave it out: evaluations come every --train.eval_every_steps, and at the end",
        ),
        Alias(
            "validation.dataset validation.dataset_path validation.seq_len",
            "leave it out: the held-out part comes from the data set, --data.name",
        ),
        Alias("validation.local_batch_size", "--train.eval_batch {}"),
        Alias("average_tokens_across_devices", "leave it out: every token counts the same on any rank"),
        Alias(
            "label_smoothing_factor label_smoothing",
            "--train.loss package.module:function, with a loss of your own",
            {"0": "leave it out: that is the default", "0.0": "leave it out: that is the default"},
        ),
        Alias("logging_nan_inf_filter", "leave it out: --train.nonfinite stop or skip decides on a NaN"),
        Alias("auto_find_batch_size auto_scale_batch_size", "leave it out: python -m fsdp.plan finds it"),
    ),
    "Sharding": (
        Alias(
            "sharding_strategy fsdp_sharding_strategy fsdp strategy dp_strategy distributed_type "
            "use_fsdp use_deepspeed",
            "--mesh.strategy {}",
            {
                **SHARDING,
                "true": _FSDP,
                "fsdp": _FSDP,
                "auto": "--mesh.strategy auto",
                "hsdp": _HSDP,
                **dict.fromkeys(_PLAIN_DDP, _DDP),
                "offload": _OFFLOAD,
                "auto_wrap": "--mesh.wrap auto",
                "full_shard auto_wrap": _FSDP,
                "full_shard auto_wrap offload": f"{_FSDP} {_OFFLOAD}",
                "megatron_lm": _FSDP,
            },
        ),
        Alias("multi_gpu", _DDP),
        Alias("zero_stage stage zero zero_optimization", _FSDP, _STAGE),
        Alias(
            "reshard_after_forward fsdp_reshard_after_forward",
            "--mesh.reshard_after_forward {}",
            _RESHARD,
        ),
        Alias(
            "data_parallel_replicate_degree dp_replicate replicate_degree num_replicas "
            "dp_replicate_size parallelism_config_dp_replicate_size",
            "--mesh.replicate {}",
            {"1": "leave it out: --mesh.replicate is derived"},
        ),
        Alias(
            "data_parallel_shard_degree dp_shard shard_degree dp_degree dp_shard_size "
            "parallelism_config_dp_shard_size",
            "--mesh.shard {}",
            {"-1": "leave it out: --mesh.shard is derived"},
        ),
        Alias(
            "tensor_parallel_degree tp_size parallelism_config_tp_size tensor_parallel "
            "tensor_parallel.* pipeline_parallel_degree pp_degree context_parallel_degree cp_size "
            "parallelism_config_cp_size parallelism_config_cp_backend "
            "parallelism_config_cp_comm_strategy parallelism_config_sp_backend "
            "parallelism_config_sp_attn_implementation parallelism_config_sp_seq_length "
            "parallelism_config_sp_seq_length_is_variable disable_loss_parallel "
            "enable_async_tensor_parallel pipeline_parallel_split_points module_fqns_per_model_part "
            "pipeline_parallel_schedule pipeline_parallel_first_stage_less_layers "
            "pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage "
            "pipeline_parallel_schedule_csv context_parallel_rotate_method "
            "pipeline_parallel_microbatch_size megatron_lm_tp_degree megatron_lm_pp_degree "
            "mp_parameters sp_size pp_size ep_size parallelism_config_sp_size sequence_parallel_size "
            "expert_parallel_degree expert_tensor_parallel_degree model_parallel_size "
            "use_parallelism_config parallelism_config use_megatron_lm megatron_lm_config.*",
            DATA_PARALLEL,
            {
                "1": "leave it out: 1 is what runs here",
                "{}": "leave it out",
                "false": "leave it out",
            },
        ),
        Alias(
            "transformer_layer_cls_to_wrap fsdp_transformer_layer_cls_to_wrap transformer_layer_cls",
            "--mesh.wrap class:{}",
        ),
        Alias(
            "min_num_params fsdp_min_num_params size_based_auto_wrap_policy",
            "--mesh.wrap size:{}",
            {"0": "leave it out: --mesh.wrap auto"},
        ),
        Alias(
            "auto_wrap_policy fsdp_auto_wrap_policy",
            "--mesh.wrap auto",
            {"no_wrap": "--mesh.wrap root"},
        ),
        Alias(
            "backward_prefetch fsdp_backward_prefetch fsdp_backward_prefetch_policy",
            "--speed.prefetch_backward 1",
        ),
        Alias(
            "forward_prefetch fsdp_forward_prefetch",
            "--speed.prefetch_forward 1",
            {"false": "leave it out: the next unit is gathered ahead, --speed.prefetch_forward 1"},
        ),
        Alias(
            "use_orig_params fsdp_use_orig_params sync_module_states fsdp_sync_module_states "
            "limit_all_gathers fsdp_version",
            ALWAYS,
        ),
        Alias(
            "fsdp_cpu_ram_efficient_loading cpu_ram_efficient_loading low_cpu_mem_usage "
            "zero3_init_flag param_init_fn",
            "leave it out: each rank makes or reads only its own shard",
        ),
        Alias(
            "ignored_modules ignored_states ignored_params fsdp_ignored_modules",
            "no counterpart: every parameter is sharded; --model.frozen NAMES trains none of them",
        ),
        Alias(
            "process_group device_mesh mesh device_id shard_placement_fn mp_policy offload_policy mesh_shape",
            "leave it out: --mesh.*, --precision.* and --memory.* set it",
        ),
        Alias(
            "fsdp_state_dict_type state_dict_type zero3_save_16bit_model zero3_gather_16bit_weights",
            _SAVED_WHOLE,
        ),
        Alias(
            "ddp_find_unused_parameters find_unused_parameters ddp_static_graph static_graph "
            "ddp_broadcast_buffers ddp_bucket_cap_mb bucket_cap_mb gradient_as_bucket_view "
            "sync_batchnorm ignore_unused_parameters",
            "leave it out: no counterpart is needed",
        ),
    ),
    "Memory, precision, speed": (
        Alias(
            "mixed_precision precision dtype torch_dtype amp use_amp param_dtype mixed_precision_param "
            "model_dtype",
            "--precision.param {}",
            _PRECISION,
        ),
        Alias("bf16", _BF16, {"false": "leave it out: fp16 or --precision.param decides"}),
        Alias("fp16", _FP16, {"false": "leave it out: bf16 or --precision.param decides"}),
        Alias(
            "reduce_dtype mixed_precision_reduce",
            "--precision.reduce {}",
            _REDUCE,
        ),
        Alias(
            "buffer_dtype keep_low_precision_grads cast_forward_inputs cast_root_forward_inputs "
            "downcast_bf16 fp16_full_eval bf16_full_eval fp16_opt_level half_precision_backend "
            "fp16_backend",
            "leave it out: --precision.param, .reduce and .output set what is cast",
        ),
        Alias("tf32", "--run.matmul_precision high", {"false": "--run.matmul_precision highest"}),
        Alias(
            "activation_checkpointing gradient_checkpointing fsdp_activation_checkpointing "
            "activation_checkpoint activation_checkpoint.mode activation_checkpointing_policy",
            _RECOMPUTE + "full",
            RECOMPUTED,
        ),
        Alias(
            "selective_ac_option",
            "--memory.activation_checkpointing full --memory.activation_checkpointing_every {}",
            {"op": _RECOMPUTE + "ops"},
        ),
        Alias(
            "activation_checkpoint.memory_budget activation_memory_budget", "--memory.activation_budget {}"
        ),
        Alias(
            "gradient_checkpointing_kwargs gradient_checkpointing_kwargs.* "
            "activation_checkpointing_kwargs activation_checkpoint.*",
            "leave it out: recomputation has no further settings",
        ),
        Alias(
            "fsdp_activation_checkpointing_offload cpu_checkpointing activation_offload",
            "--memory.activation_checkpointing full --memory.activation_offload true",
            {"false": "leave it out: that is the default"},
        ),
        Alias(
            "cpu_offload offload_params fsdp_offload_params offload offload_optimizer enable_cpu_offload",
            _OFFLOAD,
            _KEPT_ON_GPU,
        ),
        Alias(
            "offload_optimizer_device offload_optimizer.device",
            _OFFLOAD,
            {**_KEPT_ON_GPU, "nvme": "--memory.nvme optimizer --memory.nvme_dir /tmp/nvme"},
        ),
        Alias(
            "offload_param_device offload_param.device",
            _OFFLOAD,
            {**_KEPT_ON_GPU, "nvme": "--memory.nvme all --memory.nvme_dir /tmp/nvme"},
        ),
        Alias(
            "nvme_path offload_optimizer_nvme_path offload_param_nvme_path",
            "--memory.nvme optimizer --memory.nvme_dir {}",
            {"none": "leave it out"},
        ),
        Alias(
            "torch_compile dynamo_backend torch_compile_backend compile.enable training.compile "
            "use_torch_compile",
            "--speed.compile true",
            _COMPILE,
        ),
        Alias(
            "dynamo_config.* dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic torch_compile_mode "
            "dynamo_use_regional_compilation compile.* enable_compiled_autograd "
            "enable_jit_checkpoint",
            "leave it out: --speed.compile compiles each unit, with torch's default mode",
        ),
        Alias(
            "fp8 enable_fp8_linear fp8_enable_fsdp_float8_all_gather enable_fsdp_float8_all_gather "
            "fp8_backend fp8_config.backend",
            "--speed.float8 tensorwise",
            {"false": "leave it out: that is the default", "no": "leave it out: that is the default"},
        ),
        Alias(
            "float8.recipe_name quantize.linear.float8.recipe_name",
            "--speed.float8 {}",
            {"rowwise_with_gw_hp": "--speed.float8 rowwise"},
        ),
        Alias(
            "float8.emulate",
            "--speed.float8 tensorwise --speed.float8_emulate true",
            {"false": "leave it out"},
        ),
        Alias(
            "fp8_amax_compute_algo fp8_amax_history_len fp8_interval fp8_override_linear_precision "
            "fp8_pad_inner_dim fp8_use_autocast_during_eval fp8_config.* float8.* quantize.* mx.* "
            "fp8_margin fp8_format fp8_opt_level converters",
            "no counterpart: --speed.float8 off, tensorwise or rowwise is the only setting",
            {"[]": "leave it out", "false": "leave it out", "float8": "--speed.float8 tensorwise"},
        ),
        Alias(
            "use_liger_kernel liger_kernel_config liger_kernel.* use_cache neftune_noise_alpha "
            "enable_fused_linear_cross_entropy",
            NOTHING_HERE,
            {"false": "leave it out", "true": NOTHING_HERE},
        ),
        Alias(
            "torch_empty_cache_steps gc_freq gc_debug",
            "leave it out: garbage collection is timed by the run itself",
        ),
    ),
    "Optimizer and schedule": (
        Alias("learning_rate max_lr warmup_max_lr optimizer.params.lr", "--optim.lr {}"),
        Alias("optimizer optim optimizer_name optimizer.name", "--optim.name {}", _OPTIMIZERS),
        Alias(
            "optimizer.type",
            "--optim.name {}",
            {**_OPTIMIZERS, "adam": "--optim.name adamw"},
        ),
        Alias("wd optimizer.params.weight_decay", "--optim.weight_decay {}"),
        Alias("adam_beta1", "--optim.beta1 {}"),
        Alias("adam_beta2", "--optim.beta2 {}"),
        Alias("betas adam_betas", "--optim.beta1 {0} --optim.beta2 {1}"),
        Alias("adam_epsilon adam_eps optimizer.params.eps", "--optim.eps {}"),
        Alias(
            "optimizer.implementation",
            "--optim.fused {}",
            {
                "fused": "--optim.fused auto",
                "foreach": "--optim.fused false",
                "for-loop": "--optim.fused false",
            },
        ),
        Alias(
            "optim_args lr_scheduler_kwargs.* optim_target_modules adafactor early_step_in_backward "
            "torch_adam adam_w_mode bias_correction amsgrad lr_scheduler_kwargs freeze_step",
            f"leave it out, or {_OWN_OPTIMIZER}",
        ),
        Alias(
            "lr_scheduler lr_scheduler_type scheduler scheduler.type decay_type",
            "--optim.schedule {}",
            SCHEDULES,
        ),
        Alias(
            "warmup num_warmup_steps lr_warmup_steps warmup_iters warmup_num_steps lr_scheduler.warmup_steps",
            "--optim.warmup_steps {}",
        ),
        Alias(
            "warmup_ratio",
            "--optim.warmup_steps N, the ratio times the steps; without it a twentieth of the run",
            {
                "0": "--optim.warmup_steps 0",
                "0.0": "--optim.warmup_steps 0",
                "0.05": "--optim.warmup_steps -1",
            },
        ),
        Alias("warmup_min_lr warmup_min_ratio warmup_type", "leave it out: the warm-up is linear, from 0"),
        Alias(
            "decay_ratio",
            "--optim.schedule wsd --optim.decay_share {}",
            {"none": "leave it out", "1": "--optim.schedule linear", "1.0": "--optim.schedule linear"},
        ),
        Alias("total_num_steps", "--train.steps {}"),
        Alias("min_lr_factor cos_min_ratio lr_min min_lr_rate", "--optim.min_lr_ratio {}"),
        Alias("min_lr", "--optim.min_lr_ratio R, the final rate as a fraction of --optim.lr"),
    ),
    "Data and model": (
        Alias("num_workers dataloader_num_workers", "--data.workers {}"),
        Alias("prefetch_factor dataloader_prefetch_factor", "--data.prefetch {}", {"none": "leave it out"}),
        Alias(
            "pin_memory dataloader_pin_memory",
            "--data.to_device true",
            {"false": "--data.to_device false"},
        ),
        Alias("offload_optimizer.pin_memory offload_param.pin_memory", "leave it out: host memory is pinned"),
        Alias(
            "drop_last dataloader_drop_last persistent_workers dataloader_persistent_workers "
            "group_by_length dataloader_multiprocessing_context dataloader_in_order "
            "use_distributed_sampler shuffle train_sampling_strategy length_column_name "
            "reload_dataloaders_every_n_epochs accelerator_config accelerator_config.* "
            "split_batches dispatch_batches even_batches remove_unused_columns label_names "
            "ignore_data_skip",
            "leave it out: samples are shuffled by seed and step, in one order on any number of ranks",
        ),
        Alias("data_seed seed random_seed training.seed", "--run.seed {}", {"none": "leave it out"}),
        Alias(
            "seq_length max_seq_length max_seq_len block_size max_length sequence_length training.seq_len",
            "--data.seq_len {}",
        ),
        Alias(
            "dataset dataset_name",
            "--data.name {}",
            {"c4": _TOKENS, "c4_test": _TOKENS, "alpaca": _TOKENS, "wikitext": _TOKENS},
        ),
        Alias("data_dir dataset_path data_path data", "--data.dir {}", {"none": "leave it out"}),
        Alias("train_file", "--data.name {}"),
        Alias(
            "validation_file test_file",
            "no counterpart: the held-out part comes from the data set, --data.name",
        ),
        Alias("tokenizer_name tokenizer_name_or_path tokenizer_path hf_assets_path", "--data.tokenizer {}"),
        Alias("model", "--model.name {}"),
        Alias("model_name_or_path model_name pretrained_model_name_or_path", "--model.name hf:{}"),
        Alias("config_name", "--model.name hf:{} --model.weights none"),
        Alias(
            "flavor",
            "no such size here: --model.preset NAME, or sizes as in --model.args.width 4096",
            {
                "debugmodel": "--model.preset toy",
                "1b": "--model.preset 1b",
                "8b": "--model.preset 8b",
                "70b": "--model.preset 70b",
            },
        ),
        Alias("weights pretrained initial_load_path", "--model.weights {}", {"none": "leave it out"}),
        Alias("lora_r lora_rank", "--lora.rank {}"),
        Alias("lora_alpha", "--lora.alpha {}"),
        Alias("lora_dropout", "--lora.dropout {}"),
        Alias("target_modules lora_target_modules", "--lora.targets {}"),
        Alias("use_peft", "--lora.rank 16"),
    ),
    "Logs, checkpoints, debugging": (
        Alias(
            "output_dir out_dir save_dir default_root_dir work_dir dump_folder project_dir dirpath",
            "--run.dir {}",
        ),
        Alias(
            "logging_dir log_dir tensorboard_dir save_tb_folder save_traces_folder "
            "checkpoint.folder save_memory_snapshot_folder overwrite_output_dir run_name "
            "job.description",
            _IN_RUN,
        ),
        Alias(
            "logging_steps log_every_n_steps log_interval log_freq log_every steps_per_print",
            "--run.log_every_steps {}",
        ),
        Alias(
            "logging_strategy logging_first_step log_on_each_node log_level log_level_replica "
            "disable_tqdm enable_progress_bar enable_model_summary include_num_input_tokens_seen "
            "disable_color_printing print_args print_config print_after_conversion "
            "save_for_all_ranks rank_0_only include_tokens_per_second enable_autolog_hparams "
            "barebones quiet",
            "leave it out: --run.log_every_steps sets the interval of log lines",
        ),
        Alias("report_to wandb use_wandb wandb_log enable_wandb logger", "--run.wandb shardrun", _WANDB),
        Alias("wandb_project wandb.project", "--run.wandb {}"),
        Alias("project", "--run.wandb {}", {"huggingface": _NO_WANDB}),
        Alias(
            "enable_tensorboard tensorboard.enabled tensorboard",
            "leave it out: TensorBoard's files are always written, into RUN/tensorboard",
        ),
        Alias(
            "save_steps save_interval checkpointing_steps checkpoint_interval every_n_train_steps "
            "save_every checkpoint.interval",
            "--checkpoint.every_steps {}",
        ),
        Alias(
            "save_strategy enable_checkpoint enable_checkpointing checkpoint.enable",
            "--checkpoint.every_steps 100",
            {
                "no": "--checkpoint.every_steps 0",
                "false": "--checkpoint.every_steps 0",
                "epoch": "--checkpoint.every_epochs 1",
            },
        ),
        Alias("save_every_minutes", "--checkpoint.every_minutes {}"),
        Alias("train_time_interval", "--checkpoint.every_minutes M, in minutes"),
        Alias(
            "save_total_limit total_limit keep_latest_k max_to_keep",
            "--checkpoint.keep_last {}",
            {"none": "--checkpoint.keep_last 0"},
        ),
        Alias("save_top_k", "--checkpoint.keep_best {} --train.eval_every_steps 100"),
        Alias(
            "load_best_model_at_end",
            "--checkpoint.keep_best 1 --train.eval_every_steps 100",
            {"false": "leave it out: that is the default"},
        ),
        Alias(
            "metric_for_best_model monitor",
            "--checkpoint.keep_best_metric {}",
            {"loss": "--checkpoint.keep_best_metric eval_loss", "none": "leave it out"},
        ),
        Alias(
            "greater_is_better",
            "a leading - in --checkpoint.keep_best_metric: larger is better",
            {"false": "leave it out: that is the default", "none": "leave it out"},
        ),
        Alias(
            "async_mode",
            "--checkpoint.mode async",
            {"disabled": "--checkpoint.mode blocking"},
        ),
        Alias(
            "save_safetensors save_in_hf last_save_in_hf",
            "--checkpoint.export_format safetensors",
            {"false": "--checkpoint.export_format torch"},
        ),
        Alias(
            "save_only_model save_on_each_node save_last save_weights_only last_save_model_only "
            "model_weights_only initial_load_model_only initial_load_in_hf "
            "enable_first_step_checkpoint create_seed_checkpoint exclude_from_loading "
            "restore_callback_states_from_checkpoint load_only",
            "leave it out: a checkpoint holds the whole state of the run, RUN/full_model the weights alone",
        ),
        Alias(
            "resume resume_from_checkpoint ckpt_path load_checkpoint resume_from",
            "--checkpoint.resume {}",
            {
                "true": "--checkpoint.resume auto",
                "false": "--checkpoint.resume never",
                "none": "--checkpoint.resume auto",
                "last": "--checkpoint.resume auto",
                "latest": "--checkpoint.resume auto",
            },
        ),
        Alias(
            "load_step", "--checkpoint.resume FOLDER, that of the step", {"-1": "--checkpoint.resume auto"}
        ),
        Alias(
            "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push "
            "hub_revision push_to_hub_model_id trackio_space_id trackio_bucket_id "
            "trackio_static_space_id",
            _HUB,
            {"false": "leave it out", "none": "leave it out"},
        ),
        Alias(
            "deterministic full_determinism debug.deterministic training.deterministic",
            "--watch.deterministic true",
            {"false": "--watch.deterministic false"},
        ),
        Alias(
            "enable_profiling profiler flops_profiler.enabled wall_clock_breakdown",
            "--profile.trace true",
            {
                "false": "leave it out: that is the default",
                "none": "leave it out: that is the default",
            },
        ),
        Alias(
            "enable_memory_snapshot see_memory_usage memory_breakdown",
            "--profile.memory true",
            {"false": "leave it out: that is the default"},
        ),
        Alias(
            "profile_freq profiler_active profiler_warmup profile_step",
            "--profile.steps FIRST:LAST, with --profile.trace true",
        ),
        Alias("ddp_timeout init_timeout_seconds timeout", "--run.process_group_timeout_s {}"),
        Alias("train_timeout_seconds", "--watch.hang_s {}"),
        Alias("use_cpu no_cuda cpu", "--run.device cpu", {"false": "leave it out: --run.device auto"}),
        Alias("device device_type", "--run.device {}"),
        Alias(
            "do_train do_predict prediction_loss_only eval_accumulation_steps "
            "eval_do_concat_batches eval_use_gather_object include_for_metrics batch_eval_metrics "
            "skip_memory_metrics inference_mode past_index callbacks plugins benchmark "
            "detect_anomaly model_registry config_file custom_import limit_test_batches "
            "limit_predict_batches every_n_epochs checkpoint_io precision_plugin ray_scope "
            "torchdynamo include_inputs_for_metrics use_legacy_prediction_loop sharded_ddp "
            "jit_mode_eval trace_buf_size use_for_integration_test custom_config_module "
            "fault_tolerance.* memory_estimation.* experimental.* debug",
            NOTHING_HERE,
            {"false": "leave it out", "none": "leave it out", "true": NOTHING_HERE},
        ),
    ),
    "Processes and machines": (
        Alias(
            "local_rank rank world_size node_rank master_addr master_port machine_rank "
            "main_process_ip main_process_port rdzv_backend rdzv_conf rdzv_endpoint same_network "
            "accelerator compute_environment ddp_backend backend_name role module no_python "
            "main_training_function mpirun_config.* mpirun_hostfile command_file commands "
            "parallel_devices cluster_environment env process_group_backend",
            LAUNCHED,
        ),
        Alias(
            "nproc_per_node nnodes num_processes num_machines num_nodes devices gpus n_gpus "
            "num_gpus gpus_per_node gpu_ids",
            LAUNCHED,
        ),
        Alias("max_restarts monitor_interval tee log_rank_filter", _RESTARTS),
        Alias(
            "num_cpu_threads_per_process enable_cpu_affinity",
            "OMP_NUM_THREADS=N before the command",
            {"false": "leave it out"},
        ),
        Alias(
            "tpu tpu_env tpu_env.* tpu_use_cluster tpu_use_sudo tpu_cluster downcast_to_bf16 "
            "ipex_config.* use_ipex use_xpu use_mps_device tpu_num_cores tpu_metrics_debug",
            "no counterpart: CUDA and CPU only",
            {"false": "leave it out", "[]": "leave it out"},
        ),
    ),
    "DeepSpeed alone": (
        Alias("fp16.enabled", _FP16, {"false": "leave it out: bf16 or --precision.param decides"}),
        Alias(
            "bf16.enabled bfloat16.enabled",
            _BF16,
            {"false": "leave it out: fp16 or --precision.param decides"},
        ),
        Alias("amp.enabled", _FP16, {"false": "leave it out: that is the default"}),
        Alias(
            "initial_scale_power",
            "--precision.loss_scale S, with S = 2 to that power",
            {"12": "--precision.loss_scale 4096", "16": "--precision.loss_scale 65536"},
        ),
        Alias(
            "fp16.loss_scale",
            "--precision.loss_scale {}",
            {
                "0": "leave it out: the loss scale is dynamic",
                "0.0": "leave it out: the loss scale is dynamic",
            },
        ),
        Alias("fp16.* bf16.* amp.*", "leave it out: the loss scale is dynamic, from --precision.loss_scale"),
        Alias(
            "communication_data_type seq_parallel_communication_data_type",
            "--precision.reduce {}",
            _REDUCE,
        ),
        Alias("grad_accum_dtype", "leave it out: gradients are accumulated in --precision.reduce"),
        Alias(
            "gradient_predivide_factor", "--comm.divide_by {}", {"1.0": "leave it out", "1": "leave it out"}
        ),
        Alias(
            "prescale_gradients sparse_gradients zero_allow_untested_optimizer "
            "zero_force_ds_cpu_optimizer disable_allgather dump_state aio.* elasticity.* "
            "autotuning.* compression_training.* curriculum_learning.* data_efficiency.* "
            "sparse_attention.* progressive_layer_drop.* eigenvalue.* hybrid_engine.* pipeline.* "
            "nebula.* comms_logger.* csv_monitor.* comet.* flops_profiler.* tensorboard.* wandb.* "
            "data_types.*",
            NOTHING_HERE,
            {"false": "leave it out", "true": NOTHING_HERE},
        ),
        Alias(
            "overlap_comm reduce_scatter contiguous_gradients allgather_partitions round_robin_gradients",
            ALWAYS,
            {"false": "no counterpart: FSDP2 always does so"},
        ),
        Alias(
            "allgather_bucket_size reduce_bucket_size stage3_prefetch_bucket_size sub_group_size "
            "stage3_max_live_parameters stage3_max_reuse_distance "
            "stage3_param_persistence_threshold stage3_module_granularity_threshold",
            _SIZED,
        ),
        Alias(
            "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save", _SAVED_WHOLE
        ),
        Alias(
            "zero_hpz_partition_size",
            "--mesh.reshard_after_forward {}",
            {"1": "leave it out: that is the default"},
        ),
        Alias("mics_shard_size", "--mesh.strategy hsdp --mesh.shard {}", {"-1": "leave it out"}),
        Alias(
            "zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights",
            "--comm.all_gather and --comm.reduce_scatter package.module:function, of your own",
            {"false": "leave it out"},
        ),
        Alias(
            "partition_activations contiguous_memory_optimization synchronize_checkpoint_boundary profile",
            NOTHING_HERE,
            {"false": "leave it out"},
        ),
        Alias("number_checkpoints", "--memory.activation_checkpointing_every N, every N-th unit"),
        Alias(
            "zero_optimization.* offload_optimizer.* offload_param.* checkpoint.tag_validation "
            "checkpoint.load_universal checkpoint.use_node_local_storage "
            "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_inclusion_filter "
            "deepspeed_exclusion_filter deepspeed_moe_layer_cls_names",
            NOTHING_HERE,
        ),
        Alias(
            "deepspeed deepspeed_config deepspeed_config_file",
            "python -m fsdp.config migrate FILE, which translates DeepSpeed's JSON",
            {"none": "leave it out"},
        ),
    ),
}
"""By subject, in the order of docs/migrate.md."""

SAME_NAME: Mapping[str, Alias] = {
    "model.name": Alias(
        "model.name",
        "--model.name {}",
        {"llama3": "--model.name transformer", "llama2": "--model.name transformer"},
    ),
    "checkpoint.export_dtype": Alias(
        "checkpoint.export_dtype",
        "--checkpoint.export_dtype {}",
        {
            name: flags.replace("precision.reduce", "checkpoint.export_dtype")
            for name, flags in _REDUCE.items()
        },
    ),
}
"""Entries of torchtitan's files whose names are fields here too, with other values."""
