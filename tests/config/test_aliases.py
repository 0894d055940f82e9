"""Names of other trainers: the rows of aliases.md are read, and each hint is accepted as typed."""

from __future__ import annotations

import shlex

import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import FIELDS, load, pair_flags, parse_value
from fsdp.config.aliases import PAGE, Alias, is_flags, rows

LAUNCHER = "the launcher makes the ranks, as in torchrun --nproc_per_node=2 train.py"
DATA_PARALLEL = "ranks are data-parallel, on the axes --mesh.replicate and --mesh.shard"
ACCUMULATED = "micro-batches follow from --train.global_batch and --train.micro_batch"
DOCUMENTS = "where --data.name is a file or folder of documents"


def hint_of(*typed: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(typed)
    assert refused.value.hint is not None
    return refused.value.hint


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("--batch_size 32", "--train.global_batch 32"),
        ("--per_device_train_batch_size 4", "--train.micro_batch 4"),
        ("--mixed_precision bf16", "--precision.param bf16"),
        ("--bf16", "--precision.param bf16"),
        ("--fp16", "--precision.param fp16"),
        ("--precision bf16-mixed", "--precision.param bf16"),
        ("--precision bf16-true", "--precision.master bf16"),
        ("--output_dir out", "--run.dir out"),
        ("--num_workers 4", "--data.workers 4"),
        (
            "--local_rank 0",
            "leave it out: the launcher makes the ranks, as in torchrun --nproc_per_node=2 train.py",
        ),
        (
            "--local-rank=0",
            "leave it out: the launcher makes the ranks, as in torchrun --nproc_per_node=2 train.py",
        ),
        ("--sharding_strategy FULL_SHARD", "--mesh.strategy fsdp"),
        ("--sharding_strategy ShardingStrategy.HYBRID_SHARD", "--mesh.strategy hsdp"),
        ("--fsdp_sharding_strategy SHARD_GRAD_OP", "--mesh.strategy fsdp --mesh.reshard_after_forward false"),
        ("--zero_stage 2", "--mesh.strategy fsdp --mesh.reshard_after_forward false"),
        ("--mesh.strategy FULL_SHARD", "--mesh.strategy fsdp"),
        ("--mesh.strategy zero3", "--mesh.strategy fsdp"),
        ("--mesh.strategy NO_SHARD", "--mesh.strategy ddp"),
        ("--training.local_batch_size 8", "--train.micro_batch 8"),
        ("--learning_rate 3e-4", "--optim.lr 3e-4"),
        ("--gradient_checkpointing", "--memory.activation_checkpointing full"),
        ("--lr_scheduler_type constant_with_warmup", "--optim.schedule constant"),
        (
            "--optimizer lion",
            "no counterpart: --optim.name package.module:factory, with an optimizer of your own",
        ),
        ("--optimizer.type Adam", "--optim.name adamw"),
        ("--betas 0.9,0.98", "--optim.beta1 0.9 --optim.beta2 0.98"),
        ("--report_to wandb", "--run.wandb shardrun"),
        ("--model_name_or_path ./llama", "--model.name hf:./llama"),
        ("--strategy deepspeed_stage_3_offload", "--mesh.strategy fsdp --memory.cpu_offload true"),
        ("--offload_param.device nvme", "--memory.nvme all --memory.nvme_dir /tmp/nvme"),
        (
            "--tensor_parallel_degree 2",
            "no counterpart: ranks are data-parallel, on the axes --mesh.replicate and --mesh.shard",
        ),
        ("--flops_profiler.profile_step 3", "--profile.steps FIRST:LAST, with --profile.trace true"),
        ("--elasticity.max_train_batch_size 3", "no counterpart: leave it out"),
        ("--output_dir 'my run'", "--run.dir 'my run'"),
        ("--optim adamw_8bit", "--optim.name adamw --optim.state 8bit"),
        ("--n_layer 12", "--model.args.layers 12, with --model.name transformer or vit"),
        ("--init_from resume", "--checkpoint.resume auto"),
        ("--grad_clip 1.0", "--train.clip_grad_norm 1.0"),
        ("--attn_implementation flash_attention_2", "--speed.attention flash"),
        ("--zero3", "--mesh.strategy fsdp"),
        ("--sequence_len 4096", "--data.seq_len 4096"),
        ("--ema_decay 0.999", "--optim.ema 0.999"),
        ("--base_model ./llama", "--model.name hf:./llama"),
        ("--tensor-model-parallel-size 4", f"no counterpart: {DATA_PARALLEL}"),
        ("--use-distributed-optimizer", "--mesh.strategy fsdp"),
        ("--train-iters 5000", "--train.steps 5000"),
        ("--lr-decay-style cosine", "--optim.schedule cosine"),
        ("--lr-warmup-iters 200", "--optim.warmup_steps 200"),
        ("--recompute-granularity selective", "--memory.activation_checkpointing ops"),
        ("--model.encoder_seq_length 4096", "--data.seq_len 4096"),
        ("--model.optim.sched.name CosineAnnealing", "--optim.schedule cosine"),
        ("--step_scheduler.ckpt_every_steps 500", "--checkpoint.every_steps 500"),
        ("--checkpoint.save_consolidated true", "--checkpoint.export true"),
        ("--peft.dim 8", "--lora.rank 8"),
        ("--finetuning_type lora", "--lora.rank 16"),
        ("--lora_target q_proj,v_proj", "--lora.targets q_proj,v_proj"),
        ("--cutoff_len 2048", "--data.seq_len 2048"),
        ("--flash_attn fa2", "--speed.attention flash"),
        ("--pure_bf16", "--precision.master bf16"),
        ("--val_size 0.1", f"--data.args.heldout 0.1, {DOCUMENTS}"),
        ("--neat_packing", f"--data.args.rows packed, {DOCUMENTS}"),
        ("--train_on_inputs true", f"--data.args.loss all, {DOCUMENTS}"),
        ("--train_on_inputs false", "leave it out: that is the default"),
        (
            "--preprocessing_num_workers 16",
            "leave it out: a text is tokenized once a machine, into a cache",
        ),
        ("--max_samples 1000", "--train.steps N, counted in optimizer steps"),
        ("--grad_accum_steps 4", f"leave it out: {ACCUMULATED}"),
        ("--half_precision", "--precision.param fp16"),
        ("--mix_strategy interleave_under", "--data.sources FILE.toml, with a weight for each source"),
        ("--dist-url tcp://localhost:23456", f"leave it out: {LAUNCHER}"),
        ("--hostfile hosts", f"leave it out: {LAUNCHER}"),
        ("--ray.storage_path /shared/runs/first", "--run.dir /shared/runs/first"),
        ("--arch resnet50", "--model.name resnet50"),
        ("--steps 3", "did you mean --train.steps?"),
        ("--train.stepz 3", "did you mean --train.steps?"),
    ],
)
def test_what_is_typed_elsewhere_names_our_flag(typed: str, hint: str) -> None:
    assert hint_of(*shlex.split(typed)) == hint


@pytest.mark.parametrize("alias", rows(), ids=lambda alias: alias.names[0])
def test_every_hint_is_accepted_as_typed(alias: Alias) -> None:
    for name in alias.names:
        assert name not in FIELDS
        for value in ["", "2", "bf16", "true", *alias.values]:
            hint = hint_of(f"--{name.replace('*', 'some')}={value}")
            if is_flags(hint):
                for flag, text in pair_flags(shlex.split(hint)):
                    parse_value(FIELDS[flag], text)
            else:
                assert not hint.startswith("did you mean")


def test_no_name_is_listed_twice() -> None:
    names = [name for alias in rows() for name in alias.names]
    assert len(names) == len({*names})


def test_each_line_of_a_table_is_a_row() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    heads = [line for line in lines if line.startswith(("| elsewhere |", "|---"))]
    assert len(rows()) == len(lines) - len(heads)
    assert not [alias for alias in rows() if not (alias.flags and all(alias.names))]


def test_a_row_is_read_with_its_exceptions() -> None:
    """A text may have a semicolon of its own, and a value may be typed with its type's name."""
    (row,) = [alias for alias in rows() if "backward_prefetch" in alias.names]
    assert row == Alias(
        ("backward_prefetch", "fsdp_backward_prefetch", "fsdp_backward_prefetch_policy"),
        "--speed.prefetch_backward 1",
    )
    (row,) = [alias for alias in rows() if "reduce_dtype" in alias.names]
    assert row.hint("torch.float32") == "--precision.reduce fp32"
    assert row.is_exception("float32")
    assert not row.is_exception("int8")
    (row,) = [alias for alias in rows() if "betas" in alias.names]
    assert row.hint("[0.9, 0.95]") == "--optim.beta1 0.9 --optim.beta2 0.95"
    assert row.hint("0.9") == "--optim.beta1 0.9 --optim.beta2 VALUE"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("ddp", "--mesh.strategy ddp"),
        ("FULL_SHARD", "--mesh.strategy fsdp"),
        ("zero2", "--mesh.strategy fsdp --mesh.reshard_after_forward false"),
        ("true", "flags are --section.field VALUE; python train.py --help lists them"),
    ],
)
def test_a_strategy_without_its_flag(word: str, hint: str) -> None:
    assert hint_of(word) == hint
