"""--memory.loss_chunk: the training of whole logits on every mesh, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.marks import quick_are
from tests.support.plain_loop import worst_parameter
from tests.support.runs import run

STEPS = 3
BASE = (
    "--data.name tests.support.user_code:sentences --model.name transformer --model.args.vocab_size 31 "
    "--model.args.width 24 --model.args.heads 2 --model.args.layers 2 --model.args.ffn 22 "
    f"--model.args.max_seq_len 9 --train.steps {STEPS} --train.clip_grad_norm 0 --optim.warmup_steps 0 "
    "--optim.name sgd --optim.schedule constant --precision.master fp64"
)
CHUNK = "--memory.loss_chunk 7"
HSDP = "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2"
CASES = {
    "one process": (1, ""),
    "two ranks, tied, micro-batches": (2, "--model.args.tied true --train.micro_batch 2"),
    "three ranks, a batch that they do not divide": (3, "--train.global_batch 11 --train.micro_batch 2"),
    "hsdp": (4, f"{HSDP} --train.micro_batch 1 --mesh.accumulate shard"),
    "ddp, tied": (2, "--mesh.strategy ddp --model.args.tied true --train.micro_batch 2"),
    "head and embedding in units of their own": (2, "--mesh.wrap size:700"),
    "compiled": (2, "--speed.compile true"),
}  # fmt: skip
QUICK = ("two ranks, tied, micro-batches",)


@pytest.mark.long
@pytest.mark.parametrize("case", quick_are(QUICK, CASES, []))
def test_a_run_is_the_same_with_whole_logits(case: str, tmp_path: Path) -> None:
    ranks, words = CASES[case]
    whole = run(ranks, tmp_path / "whole", BASE, words)
    chunked = run(ranks, tmp_path / "chunked", BASE, words, CHUNK)
    ours, theirs = ([r for r in one.records if "loss" in r] for one in (chunked, whole))
    assert [r["step"] for r in ours] == [1, 2, 3]
    for field in ("loss", "grad_norm"):
        assert [r[field] for r in ours] == pytest.approx([r[field] for r in theirs], rel=1e-12)
    assert worst_parameter(chunked.parameters, whole.parameters) < 1e-12
