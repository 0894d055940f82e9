"""Settings of Megatron-LM, NeMo, LLaMA-Factory and example scripts, and more of Axolotl, Lightning and
Accelerate, and their flags here, as rows.

Not here: the other trainers (alias_table.py, alias_models.py), the search in the rows (aliases.py).
"""

from __future__ import annotations

from fsdp.config.alias_table import (
    ALWAYS,
    DATA_PARALLEL,
    LAUNCHED,
    NOTHING_HERE,
    QUANTIZED,
    RECOMPUTED,
    SCHEDULES,
    Alias,
)

_UNSET = {"false": "leave it out", "none": "leave it out", "0": "leave it out"}
_DOCUMENTS = "where --data.name is a file or folder of documents"
_TEMPLATE = f"--data.args.chat_template FILE, {_DOCUMENTS}; without it the tokenizer's own"
_TRAINED_ON = f"--data.args.loss all, {_DOCUMENTS}"
_CACHED = "leave it out: a text is tokenized once a machine, into a cache"
_METHOD = "no counterpart: full training, or adapters with --lora.rank"
_SUPERVISED = "no counterpart: supervised training alone, on rows of text, prompts or conversations"
_PICTURES = "no counterpart: --data.name package.module:factory, whose data set augments its pictures"
_KERNELS = (
    "no counterpart: --speed.compile true fuses what torch.compile can, --memory.loss_chunk 1024 the head"
)
_EARLY = "no counterpart: --checkpoint.keep_best 1 keeps the best checkpoint; touch RUN/STOP ends a run"
_LENGTH = "--train.epochs or --train.steps"
_TRACKER = "no counterpart: --run.sinks package.module:Class, with a class of your own"
_HALF_ON = {"false": "leave it out: --precision.param decides"}

SCRIPTS: tuple[Alias, ...] = (
    Alias(
        "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
        "context_parallel_size tensor_parallel_size pipe_parallel_size expert_model_parallel_size "
        "sequence_parallel sequence_parallel_degree tp pp cp ep sp",
        DATA_PARALLEL,
        {"1": "leave it out: 1 is what runs here", "false": "leave it out", "none": "leave it out"},
    ),
    Alias("dp dp_size distributed.dp_size", "leave it out: it is the number of ranks", {"1": "leave it out"}),
    Alias(
        "use_torch_fsdp2 use_megatron_fsdp use_custom_fsdp use_distributed_optimizer ddp",
        "--mesh.strategy fsdp",
        {"false": "leave it out"},
    ),
    Alias(
        "data_parallel_sharding_strategy",
        "--mesh.strategy fsdp",
        {
            "no_shard": "--mesh.strategy ddp",
            "optim": "--mesh.strategy fsdp --mesh.reshard_after_forward step",
            "optim_grads": "--mesh.strategy fsdp --mesh.reshard_after_forward false",
        },
    ),
    Alias("overlap_grad_reduce overlap_param_gather overlap_param_gather_with_optimizer_step", ALWAYS),
    Alias(
        "recompute_activations recompute_granularity activations_checkpoint_granularity",
        "--memory.activation_checkpointing full",
        {**RECOMPUTED, "true": "--memory.activation_checkpointing ops"},
    ),
    Alias(
        "recompute_method recompute_num_layers activations_checkpoint_method "
        "activations_checkpoint_num_layers",
        "--memory.activation_checkpointing_every N, every N-th unit",
    ),
    Alias(
        "disable_gradient_checkpointing",
        "--memory.activation_checkpointing none",
        {"false": "--memory.activation_checkpointing full"},
    ),
    Alias(
        "activation_offloading layer_offloading cpu_offloading",
        "--memory.activation_checkpointing full --memory.activation_offload true",
        {"false": "leave it out"},
    ),
    Alias(
        "excess_length_strategy min_sample_len",
        "leave it out: a conversation is cut at --data.seq_len, a text is split",
    ),
    Alias(
        "shuffle_merged_datasets curriculum_sampling eval_on_each_dataset dataloader.collate_fn",
        "leave it out: samples are shuffled by seed and step; --data.sources FILE.toml weighs several sets",
    ),
    Alias("tokens tokens_per_batch", "--train.global_batch N, counted in rows of --data.seq_len tokens"),
    Alias("infer_backend", "leave it out: python -m fsdp.predict RUN generates"),
    Alias("train_split", "leave it out: --data.name has the rows that are trained on"),
    Alias("token", "leave it out: nothing is downloaded; --model.name hf:FOLDER reads a folder"),
    Alias("distributed._target_", "--mesh.strategy fsdp"),
    Alias("checkpoint.enabled", "--checkpoint.every_steps 100", {"false": "--checkpoint.every_steps 0"}),
    Alias("optimizer.foreach foreach", "--optim.fused false", {"false": "leave it out: --optim.fused auto"}),
    Alias("step_size", "--optim.schedule package.module:function, with a schedule of your own"),
    Alias("ignore_pad_token_for_loss", "leave it out: padding is masked"),
    Alias(
        "compute_accuracy include_effective_tokens_per_second",
        "leave it out: RUN/metrics.jsonl has every number of a step",
    ),
    Alias(
        "upcast_layernorm upcast_lmhead_output",
        "leave it out: --precision.param, .reduce and .output set what is cast",
    ),
    Alias("tool_format enable_thinking", _TEMPLATE),
    Alias(
        "compression_training hybrid_engine load_universal additional_target noisy_embedding_alpha "
        "kwargs_handlers",
        NOTHING_HERE,
        _UNSET,
    ),
    Alias("use_reentrant_gc", "leave it out: recomputation has no further settings"),
    Alias("pure_bf16 megatron_amp_o2", "--precision.master bf16", _HALF_ON),
    Alias("use_bf16", "--precision.param bf16", _HALF_ON),
    Alias("half_precision use_fp16", "--precision.param fp16", _HALF_ON),
    Alias("fp32", "--precision.param fp32", {"false": "leave it out: --precision.param decides"}),
    Alias("per_device_batch_size batch_size_per_gpu batch_size_per_device", "--train.micro_batch {}"),
    Alias(
        "grad_accum_steps accumulation_steps gradient_accumulation update_freq",
        "leave it out: micro-batches follow from --train.global_batch and --train.micro_batch",
    ),
    Alias(
        "total_steps n_steps train_iters iterations iters niter n_iters num_iterations", "--train.steps {}"
    ),
    Alias(
        "train_samples total_samples max_tokens train_tokens", "--train.steps N, counted in optimizer steps"
    ),
    Alias(
        "steps_per_epoch start_epoch", f"leave it out: a run's length is {_LENGTH}, and it resumes by itself"
    ),
    Alias("epoch n_epochs nb_epochs", "--train.epochs {}"),
    Alias(
        "warmup_epochs warmup_fraction lr_warmup_fraction lr_warmup_samples warmup_proportion",
        "--optim.warmup_steps N, counted in optimizer steps; without it a twentieth of the run",
    ),
    Alias("lr_warmup_iters", "--optim.warmup_steps {}"),
    Alias("warmup_lr lr_warmup_init", "leave it out: the warm-up is linear, from 0"),
    Alias("lr_decay_style sched sched.name lr_schedule scheduler_name", "--optim.schedule {}", SCHEDULES),
    Alias("cosine", "--optim.schedule cosine", {"false": "leave it out"}),
    Alias(
        "lr_decay lr_decay_steps decay_steps decay_epochs lr_decay_samples",
        "leave it out: the schedule ends with the run, --train.steps",
    ),
    Alias(
        "gamma lr_gamma milestones lr_step_size lr_milestones",
        "--optim.schedule package.module:function, with a schedule of your own",
    ),
    Alias("opt", "--optim.name {}", {"adamw": "--optim.name adamw", "sgd": "--optim.name sgd"}),
    Alias("nesterov", "no counterpart: --optim.name package.module:factory, with an optimizer of your own"),
    Alias(
        "lr_groups no_weight_decay_cond loraplus_lr_ratio embedding_lr", "no counterpart: one rate for all"
    ),
    Alias("clip clip_gradients clip_grad_norm gradient_clip grad_norm_clip", "--train.clip_grad_norm {}"),
    Alias(
        "track_grad_norm log_grad_norm", "leave it out: every step's gradient norm is in RUN/metrics.jsonl"
    ),
    Alias(
        "terminate_on_nan check_for_nan_in_loss_and_grad",
        "--train.nonfinite stop",
        {"false": "--train.nonfinite skip"},
    ),
    Alias("early_stopping_steps early_stopping_patience early_stopping early_stop patience", _EARLY, _UNSET),
    Alias(
        "loss_watchdog_threshold loss_watchdog_patience",
        "no counterpart: --train.nonfinite stop ends a run that diverges; --watch.spike F names the samples",
    ),
    Alias(
        "auto_lr_find stochastic_weight_avg",
        "no counterpart: --optim.lr; --optim.ema 0.999 averages weights",
        _UNSET,
    ),
    Alias(
        "cutoff_len encoder_seq_length model_max_length ctx_len max_position_embeddings", "--data.seq_len {}"
    ),
    Alias("packed_sequence_size", f"--data.args.rows packed, {_DOCUMENTS}, and --data.seq_len {{}}", _UNSET),
    Alias(
        "neat_packing eval_sample_packing pack multipack_real_batches",
        f"--data.args.rows packed, {_DOCUMENTS}",
        {"false": f"--data.args.rows document, {_DOCUMENTS}"},
    ),
    Alias("template chat_template conversation_template", _TEMPLATE),
    Alias("train_on_prompt train_on_inputs", _TRAINED_ON, {"false": "leave it out: that is the default"}),
    Alias(
        "mask_history completion_only_loss assistant_only_loss",
        "leave it out: --data.args.loss sets what is trained on",
    ),
    Alias(
        "val_size val_split validation_split test_size eval_split",
        f"--data.args.heldout {{}}, {_DOCUMENTS}",
    ),
    Alias("split splits_string", f"--data.args.heldout 0.01, the share held out, {_DOCUMENTS}"),
    Alias(
        "eval_dataset validation_dataset.split val_data_path valid_data_path",
        "leave it out: the held-out part comes from the data set, --data.name",
    ),
    Alias(
        "max_samples max_train_samples num_samples limit_samples",
        "--train.steps N, counted in optimizer steps",
    ),
    Alias(
        "preprocessing_num_workers dataset_processes dataset_num_proc overwrite_cache "
        "dataset_prepared_path tokenized_path cache_dir skip_prepare_dataset line_by_line",
        _CACHED,
    ),
    Alias(
        "streaming buffer_size shuffle_buffer_size dataset_keep_in_memory",
        "leave it out: files are mapped, never read whole",
    ),
    Alias(
        "mix_strategy interleave_probs data_mix blend",
        "--data.sources FILE.toml, with a weight for each source",
    ),
    Alias("data_prefix train_data_path", "--data.name {}"),
    Alias(
        "dataset_config_name dataset_text_field text_column",
        f"leave it out: a row's text, prompt or messages is trained on, {_DOCUMENTS}",
    ),
    Alias(
        "tokenizer_type tokenizer.library use_fast_tokenizer",
        "leave it out: --data.tokenizer FOLDER has the class too",
    ),
    Alias("tokenizer_model vocab_file tokenizer.model", "--data.tokenizer FOLDER, with tokenizer.json"),
    Alias(
        "merge_file special_tokens new_special_tokens split_special_tokens resize_vocab",
        "leave it out: --data.tokenizer FOLDER has them",
    ),
    Alias(
        "flash_attn",
        "--speed.attention flash",
        {
            "auto": "--speed.attention auto",
            "disabled": "--speed.attention math",
            "sdpa": "--speed.attention auto",
            "fa2": "--speed.attention flash",
        },
    ),
    Alias(
        "flex_attention s2_attention shift_attn sparse_attention",
        "no counterpart: --speed.attention auto, flash, efficient or math",
        {"false": "leave it out"},
    ),
    Alias("rope_scaling rotary_base", "leave it out: config.json of --model.name hf:FOLDER has it"),
    Alias(
        "finetuning_type",
        "--lora.rank 16",
        {
            "full": "leave it out: that is the default",
            "freeze": "--model.frozen NAMES, of the parameters that stay as they are",
        },
    ),
    Alias(
        "lora_target peft.target_modules",
        "--lora.targets {}",
        {"all": "leave it out: every linear layer of the blocks"},
    ),
    Alias("peft.dim", "--lora.rank {}"),
    Alias(
        "use_dora use_rslora pissa_init peft_use_dora use_galore use_badam use_llama_pro "
        "relora_steps lora_fan_in_fan_out lora_modules_to_save",
        _METHOD,
        _UNSET,
    ),
    Alias(
        "freeze_trainable_layers freeze_trainable_modules unfrozen_parameters "
        "freeze_vision_tower freeze_layers",
        "--model.frozen NAMES, of the parameters that stay as they are",
    ),
    Alias("quantization_bit quantization_method", QUANTIZED, _UNSET),
    Alias(
        "use_unsloth enable_liger_kernel lora_mlp_kernel cut_cross_entropy liger_rms_norm "
        "liger_glu_activation liger_fused_linear_cross_entropy transformer_engine",
        _KERNELS,
        _UNSET,
    ),
    Alias("rl trl pref_beta pref_loss ref_model reward_model dpo_beta", _SUPERVISED, _UNSET),
    Alias(
        "moe_aux_loss_coef router_aux_loss_coef", "leave it out: config.json of --model.name hf:FOLDER has it"
    ),
    Alias("adapter_name_or_path lora_model_dir", "--model.weights {}"),
    Alias("export_dir", "leave it out: RUN/full_model; python -m fsdp.checkpoint --help writes it elsewhere"),
    Alias("export_size", "--checkpoint.export_shard_gib {}"),
    Alias(
        "model_save_format ckpt_format",
        "--checkpoint.export_format safetensors",
        {
            "torch_save": "--checkpoint.export_format torch",
            "torch_dist": "leave it out: checkpoints are torch's DCP",
            "torch": "--checkpoint.export_format torch",
            "torch_dcp": "leave it out: checkpoints are torch's DCP",
        },
    ),
    Alias("save_consolidated", "--checkpoint.export true", {"false": "--checkpoint.export false"}),
    Alias(
        "no_load_optim no_load_rng no_save_optim finetune",
        "--model.weights FOLDER, which reads the weights alone",
    ),
    Alias(
        "load restore_from_path resume_if_exists auto_resume_from_checkpoints from_checkpoint",
        "leave it out: a run directory resumes by itself, --run.dir RUN",
    ),
    Alias(
        "storage_path save ckpt ckpt_dir checkpoint_path checkpoint_dir weights_save_path exp_dir",
        "--run.dir {}",
    ),
    Alias("ckpt_every_steps save_freq checkpoint_freq", "--checkpoint.every_steps {}"),
    Alias("save_first_step", "leave it out: --checkpoint.every_steps sets the interval"),
    Alias("val_every_steps eval_freq", "--train.eval_every_steps {}"),
    Alias("print_freq log_freq_steps", "--run.log_every_steps {}"),
    Alias("exit_duration_in_mins", "--stop.deadline_s SECONDS, after which the run saves and stops"),
    Alias("exit_signal_handler", "leave it out: SIGTERM, SIGUSR1 and Ctrl-C save and stop"),
    Alias(
        "exp_name experiment_name exp_manager.name plot_loss logdir",
        "leave it out: --run.dir is the run's folder, with its records and report",
    ),
    Alias("create_wandb_logger with_tracking", "--run.wandb shardrun", {"false": "leave it out"}),
    Alias("mlflow_experiment_name tracker_project_name", "--run.mlflow {}"),
    Alias(
        "mlflow_tracking_uri",
        "leave it out: export MLFLOW_TRACKING_URI={}, which mlflow reads itself, with --run.mlflow NAME",
    ),
    Alias("use_swanlab swanlab_project comet_api_key wandb_watch use_comet use_neptune", _TRACKER, _UNSET),
    Alias("verbose log_mfu", "leave it out: RUN/metrics.jsonl has every number of a step"),
    Alias("timeout_minutes distributed_timeout_minutes", "--run.process_group_timeout_s SECONDS"),
    Alias("dist_backend dist_env.backend distributed_backend", "leave it out: NCCL on CUDA, gloo on CPUs"),
    Alias(
        "gpu cuda use_cuda n_gpu ngpu no_gpu",
        "--run.device cuda, on as many GPUs as the launcher starts ranks",
        {"false": "--run.device cpu", "0": "leave it out: torchrun's rank selects the GPU"},
    ),
    Alias("workers dataloader_workers n_workers num_data_workers", "--data.workers {}"),
    Alias("pin_mem", "--data.to_device true", {"false": "--data.to_device false"}),
    Alias("arch backbone model_type", "--model.name {}"),
    Alias("from_pretrained", "--model.name hf:{}"),
    Alias("hidden_dim", "--model.args.width {}, with --model.name transformer or vit"),
    Alias("ffn_hidden_size", "--model.args.ffn {}, with --model.name transformer or vit"),
    Alias("num_query_groups", "--model.args.kv_heads {}, with --model.name transformer"),
    Alias(
        "num_classes image_size img_size input_size patch_size",
        "--model.args, for --model.name vit follow from the data; of your own: --model.args.NAME {}",
    ),
    Alias(
        "mixup mixup_alpha cutmix cutmix_alpha aa auto_augment reprob random_erase color_jitter "
        "hflip drop_path drop",
        _PICTURES,
        _UNSET,
    ),
    Alias("image_max_pixels media_dir visual_inputs", _PICTURES),
    Alias("smoothing", "--train.loss package.module:function, with a loss of your own", _UNSET),
    Alias(
        "dist_url multiprocessing_distributed hostfile include exclude launcher deepspeed_mpi "
        "ssh_port rdzv_id standalone nodes",
        LAUNCHED,
    ),
    Alias(
        "auto_select_gpus replace_sampler_ddp use_seedable_sampler use_stateful_dataloader "
        "non_blocking step_scheduler_with_optimizer",
        "leave it out: samples are shuffled by seed and step, in one order on any number of ranks",
    ),
    Alias(
        "tpu_cores ipex amp_level amp_backend",
        "no counterpart: CUDA and CPU only, with --precision.param",
        _UNSET,
    ),
    Alias(
        "hf_use_auth_token model_revision push_dataset_to_hub",
        "leave it out: nothing is downloaded or uploaded; --model.name hf:FOLDER reads a folder",
    ),
    Alias(
        "swiglu normalization untie_embeddings_and_output_weights disable_bias_linear "
        "group_query_attention init_method_std",
        "leave it out: the model has it: --model.preset, or config.json of --model.name hf:FOLDER",
    ),
    Alias(
        "model._target_ dataset._target_ loss_fn._target_ optimizer._target_",
        "package.module:name, as in --model.name, --data.name, --train.loss and --optim.name",
    ),
)
