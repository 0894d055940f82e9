"""The search chooses the fastest plan that fits with its margin, on the fewest GPUs, and none that
train.py refuses.
"""

from __future__ import annotations

import functools

import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import load
from fsdp.plan.__main__ import fields_set
from fsdp.plan.search import SearchResult, search
from tests.plan.asked import SMALL

KNOBS = ("--memory.activation_checkpointing", "none", "--mesh.reshard_after_forward", "true")


@functools.cache
def found(*flags: str) -> SearchResult:
    words = [*SMALL, *KNOBS, *flags]
    return search(load(words), fields_set(words))


@pytest.mark.slow
def test_the_first_is_the_fastest_that_fits() -> None:
    plans = found("--plan.gpus", "8").plans
    speeds = [plan.samples_s for plan in plans if plan.fits]
    assert speeds == sorted(speeds, reverse=True)
    assert len({(plan.sizes, plan.config.mesh.reshard_after_forward) for plan in plans}) == len(plans)


@pytest.mark.slow
@pytest.mark.long
def test_flags_that_are_set_stay() -> None:
    for plan in found("--plan.gpus", "8", "--mesh.shard", "4", "--train.global_batch", "32").plans:
        assert plan.sizes.shard == 4
        assert plan.micro_batch * plan.accumulation * 8 == 32
        assert plan.config.memory.activation_checkpointing == "none"


@pytest.mark.slow
@pytest.mark.long
def test_the_margin_decides_what_fits() -> None:
    needed = (
        found("--plan.gpus", "4", "--mesh.strategy", "fsdp", "--train.micro_batch", "1").plans[0].needed
        / 2**30
    )
    room = (
        "--plan.gpus",
        "4",
        "--mesh.strategy",
        "fsdp",
        "--train.micro_batch",
        "1",
        "--plan.memory_gib",
        f"{1.04 * needed:.6f}",
    )
    assert found(*room).fitting
    assert not found(*room, "--plan.margin", "0.05", "--memory.cpu_offload", "false").plans[0].fits


@pytest.mark.slow
@pytest.mark.long
def test_the_fewest_ranks_that_fit() -> None:
    wide = (
        "--model.args.width",
        "768",
        "--train.micro_batch",
        "1",
        "--mesh.strategy",
        "fsdp",
        "--memory.cpu_offload",
        "false",
    )
    whole = found(*wide, "--plan.gpus", "1").plans[0]
    fixed = whole.rates.overhead / 2**30
    least = found(*wide, "--plan.memory_gib", f"{fixed + 0.5 * (whole.needed / 2**30 - fixed):.4f}")
    assert least.ranks > 1
    assert least.fitting
    half = (
        "--plan.gpus",
        str(least.ranks // 2),
        "--plan.memory_gib",
        f"{fixed + 0.5 * (whole.needed / 2**30 - fixed):.4f}",
    )
    assert not found(*wide, *half).fitting


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        (("--mesh.strategy", "ddp"), 2),
        (("--mesh.strategy", "hsdp"), 4),
        (("--mesh.reshard_after_forward", "2"), 2),
    ],
)
def test_numbers_of_ranks_that_the_flags_do_not_allow_are_passed_over(
    flags: tuple[str, str], ranks: int
) -> None:
    """The model fits one rank, on which none of these flags is possible."""
    least = found("--train.micro_batch", "1", *flags)
    assert least.ranks == ranks
    assert least.fitting
    assert {plan.sizes.ranks for plan in least.plans} == {ranks}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--train.global_batch 3",
            "2 ranks and more are refused: --train.global_batch 3 over 2 ranks is 1.5 samples a rank: .* "
            "HINT: --train.global_batch 4",
        ),
        (
            "--train.global_batch 4 --train.micro_batch 4",
            "2 ranks and more are refused: --train.micro_batch 4 does not divide a rank's share: .* "
            "HINT: --train.micro_batch 2",
        ),
    ],
)
def test_a_batch_that_ends_the_search_is_named(flags: str, message: str) -> None:
    tight = ("--plan.memory_gib", "1.45", "--memory.cpu_offload", "false")
    whole = f"no number of H100 SXM up to 4096 holds this model. {message}.*, or --plan.gpu with more memory"
    with pytest.raises(ConfigError, match=whole):
        found(*tight, *flags.split())


@pytest.mark.slow
@pytest.mark.long
def test_offload_is_tried_where_nothing_else_fits() -> None:
    wide = (
        "--model.args.width",
        "768",
        "--train.micro_batch",
        "1",
        "--mesh.strategy",
        "fsdp",
        "--plan.gpus",
        "2",
    )
    without = min(plan.needed for plan in found(*wide, "--memory.cpu_offload", "false").plans)
    tight = found(*wide, "--plan.memory_gib", f"{without / 2**30 * 0.95:.4f}")
    assert tight.plans[0].config.memory.cpu_offload
    assert tight.plans[0].fits


def test_a_model_that_counts_its_blocks_is_searched() -> None:
    own = ("--model.name", "tests.plan.own:Counting", "--data.args.vocab_size", "96")
    one = ("--plan.gpus", "2", "--mesh.strategy", "fsdp", "--train.micro_batch", "1")
    assert found(*own, *one, "--model.args.layers", "9").fitting
