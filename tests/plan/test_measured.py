"""Predicted beside real steps on gloo ranks: the short form of python -m bench.plan."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bench import plan_cuda, plan_hf
from bench.plan import MARGIN
from bench.plan_cases import Case
from bench.plan_real import _asks, _real_steps
from fsdp.config import load
from fsdp.distributed.env import DistEnv
from fsdp.plan.estimate import memory_of
from fsdp.plan.fake_step import trace_step
from tests.support.marks import sample_are
from tests.support.world import run_world

SMALL = ("--model.name", "transformer", "--data.name", "synthetic", "--data.args.kind", "tokens",
         "--data.seq_len", "32", "--model.args.layers", "3", "--model.args.width", "64")  # fmt: skip
BATCH = ("--train.global_batch", "12", "--train.micro_batch", "2")
HALVED = ("--lora.rank", "4", "--precision.frozen", "bf16")
CASES = (
    Case(2, (*SMALL, *BATCH, "--precision.param", "bf16", "--memory.activation_checkpointing", "ops")),
    Case(2, (*SMALL, *BATCH, "--mesh.strategy", "ddp", "--precision.param", "bf16", "--optim.name", "sgd")),
    Case(2, (*SMALL, *BATCH, "--lora.rank", "4", "--mesh.reshard_after_forward", "false")),
    Case(2, (*SMALL, *BATCH, "--mesh.wrap", "every:2", "--memory.activation_checkpointing", "full")),
    Case(2, (*SMALL, *BATCH, "--mesh.unsharded", "*norm.weight,embedding.weight")),
    Case(2, ("--model.name", "tests.plan.own:Words", *SMALL[2:], *BATCH, "--data.args.vocab_size", "257",
             "--optim.state", "8bit")),
    Case(2, (*SMALL, *BATCH, *HALVED, "--precision.param", "bf16")),
    Case(2, (*SMALL, *BATCH, *HALVED, "--memory.activation_checkpointing", "full")),
    Case(3, (*SMALL, *BATCH, *HALVED, "--precision.param", "bf16", "--mesh.reshard_after_forward", "false")),
    Case(2, (*SMALL, *BATCH, "--precision.master", "bf16", "--memory.activation_checkpointing", "ops")),
    Case(3, (*SMALL, *BATCH, "--precision.master", "bf16", "--precision.param", "fp32")),
)  # fmt: skip


def tensors(env: DistEnv, flags: tuple[str, ...]) -> float:
    return _real_steps(flags, env.world_size, env.rank)


@pytest.mark.parametrize("case", sample_are(CASES[1:2], CASES), ids=str)
def test_planned_bytes_are_those_of_a_real_step(case: Case) -> None:
    measured = run_world(case.ranks, tensors, case.flags)
    planned = [memory_of(trace_step(ask), ask).peak for ask in _asks(case.flags, case.ranks)]
    assert planned == pytest.approx(measured, rel=0.01)
    assert all(p * (1 + MARGIN) >= m for p, m in zip(planned, measured, strict=True))


@pytest.mark.needs("transformers")
@pytest.mark.parametrize(("name", "variant"), sample_are([], plan_hf.CASES[::3]))
def test_planned_bytes_of_a_model_of_transformers(name: str, variant: str, tmp_path: Path) -> None:
    """Each model and each variant; python -m bench.plan_hf has all pairs."""
    plan_hf.write_folder(name, tmp_path / name)
    case = plan_hf.case_of(name, variant, tmp_path)
    measured = run_world(case.ranks, tensors, case.flags)
    planned = [memory_of(trace_step(ask), ask).peak for ask in _asks(case.flags, case.ranks)]
    assert planned == pytest.approx(measured, rel=0.01)


@pytest.mark.slow
def test_cases_of_the_cuda_bench_can_be_planned() -> None:
    drawn = plan_cuda.draw(random.Random(7), 24)
    for case in drawn:
        assert load(case.flags).speed.compile == "false"
    smallest = min(drawn[:8], key=lambda case: int(case.flags[case.flags.index("--model.args.width") + 1]))
    peaks = plan_cuda.planned(smallest)
    assert 0 < peaks.allocated <= peaks.reserved
    kept = json.loads((plan_cuda.RESULTS / "plan_cuda.json").read_text(encoding="utf-8"))["runs"]
    (of_an_h200,) = [run["measured"] for run in kept if run["case"]["flags"] == list(smallest.flags)]
    assert peaks.allocated == pytest.approx(of_an_h200["allocated"], rel=0.03)
