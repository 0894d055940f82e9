"""Names of other trainers: each hint is accepted as typed, and docs/migrate.md has the same table."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import FIELDS, load, pair_flags, parse_value
from fsdp.config.aliases import ALIASES, Alias

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrate.md"


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
        ("--lr_scheduler_type constant_with_warmup", "--optim.schedule cosine"),
        ("--optim adamw_8bit", "--optim.name adamw --optim.state 8bit"),
        ("--steps 3", "did you mean --train.steps?"),
        ("--train.stepz 3", "did you mean --train.steps?"),
    ],
)
def test_what_is_typed_elsewhere_names_our_flag(typed: str, hint: str) -> None:
    assert hint_of(*typed.split()) == hint


@pytest.mark.parametrize("alias", ALIASES, ids=lambda alias: alias.names.split()[0])
def test_every_hint_is_accepted_as_typed(alias: Alias) -> None:
    for name in alias.names.split():
        assert name not in FIELDS
        for value in ["", "2", "bf16", "true", *alias.values]:
            hint = hint_of(f"--{name}={value}")
            if hint.startswith("--"):
                for flag, text in pair_flags(hint.split(" ")):
                    parse_value(FIELDS[flag], text)


def test_the_page_has_the_table() -> None:
    """Row by row, so that a change of one is a change of the other."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert rows == [row(alias) for alias in ALIASES]


def row(alias: Alias) -> str:
    names = ", ".join(f"`{name}`" for name in alias.names.split())
    ours = f"`{alias.flags}`" if alias.flags.startswith("--") else alias.flags
    others = dict.fromkeys(f"`{flags}`" for flags in alias.values.values() if flags != alias.flags)
    by_value = "; ".join(
        f"{', '.join(value for value, flags in alias.values.items() if f'`{flags}`' == other)} → {other}"
        for other in others
    )
    return f"| {names} | {ours.replace('{}', 'VALUE')} | {by_value} |"
