"""Flags of other trainers end in a HINT that is accepted as typed."""

from __future__ import annotations

import shlex

import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import FIELDS, load, pair_flags, parse_value
from fsdp.config.aliases import HINTS, SHARDING, is_flags


def hint_of(*typed: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(typed)
    assert refused.value.hint is not None
    return refused.value.hint


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (
            "--batch_size 32",
            "--train.micro_batch 32, --train.global_batch 32 × ranks × accumulation: per rank elsewhere",
        ),
        ("--train_batch_size 32", "--train.global_batch 32"),
        ("--bf16.enabled true", "--precision.param bf16"),
        ("--zero_optimization.offload_optimizer.device cpu", "--memory.optimizer_offload true"),
        ("--zero_optimization.offload_param.device cpu", "--memory.cpu_offload true"),
        ("--optimizer.params.lr 3e-4", "--optim.lr 3e-4"),
        ("--num_to_keep 2", "--checkpoint.keep_last 2"),
        ("--tensor_parallel_degree 2", "--mesh.tensor 2"),
        ("--per_device_train_batch_size 4", "--train.micro_batch 4"),
        ("--bf16", "--precision.param bf16"),
        ("--precision bf16-mixed", "--precision.param bf16"),
        ("--torch_dtype torch.bfloat16", "--precision.param bf16"),
        ("--sharding_strategy ShardingStrategy.HYBRID_SHARD", "--mesh.strategy hsdp"),
        ("--fsdp_sharding_strategy SHARD_GRAD_OP", "--mesh.strategy fsdp --mesh.reshard_after_forward false"),
        ("--zero_stage 2", "--mesh.strategy fsdp --mesh.reshard_after_forward false"),
        ("--mesh.strategy FULL_SHARD", "--mesh.strategy fsdp"),
        ("--training.local_batch_size 8", "--train.micro_batch 8"),
        ("--betas [0.9,0.98]", "--optim.beta1 0.9 --optim.beta2 0.95"),
        ("--model_name_or_path ./llama", "--model.name hf:./llama"),
        ("--output_dir 'my run'", "--run.dir 'my run'"),
        ("--steps 3", "did you mean --train.steps?"),
        ("--train.stepz 3", "did you mean --train.steps?"),
        ("FULL_SHARD", "--mesh.strategy fsdp"),
        ("ddp", "--mesh.strategy ddp"),
    ],
)
def test_what_is_typed_elsewhere_names_our_flag(typed: str, hint: str) -> None:
    assert hint_of(*shlex.split(typed)) == hint


def test_every_hint_is_accepted_as_typed_and_no_name_is_listed_twice() -> None:
    names = [name for words in HINTS.values() for name in words.split()]
    assert len(names) == len({*names})
    assert not {*names} & {*FIELDS}
    hints = [hint_of(f"--{name}={value}") for name in names for value in ("", "2", "bf16", "true")]
    for hint in filter(is_flags, [*hints, *SHARDING]):
        for flag, text in pair_flags(shlex.split(hint)):
            parse_value(FIELDS[flag], text)


@pytest.mark.parametrize("name", ["accelerate.yaml", "deepspeed.json"])
def test_another_trainers_file_is_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match="recipes are TOML") as refused:
        load(["--config", name])
    assert refused.value.hint == "docs/migrate.md"
