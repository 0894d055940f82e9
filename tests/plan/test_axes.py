"""Context, tensor and expert in a plan: what falls on a rank, its links, when a search tries them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.plan import MARGIN
from bench.plan_real import _asks, _real_steps
from fsdp.config import load
from fsdp.distributed.env import DistEnv
from fsdp.distributed.mesh import MeshSizes
from fsdp.plan.__main__ import main
from fsdp.plan.estimate import Plan, memory_of
from fsdp.plan.fake_step import trace_step
from fsdp.plan.step_time import rates_for, send
from tests.models.more_hf import build
from tests.plan.asked import SMALL, plan
from tests.support.marks import sample_are
from tests.support.world import run_world

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}  # fmt: skip
MIXTURE = {**SIZES, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 4}
"""Each token goes to each expert: as even as the planner's exchange."""
BATCH = ("--data.name", "synthetic", "--data.args.kind", "tokens", "--train.micro_batch", "2")
BUILT_IN = ("--model.name", "transformer", "--model.args.layers", "3", "--model.args.width", "128",
            "--model.args.heads", "8", "--data.seq_len", "64")  # fmt: skip
TRANSFORMERS = ("--data.args.vocab_size", "256", "--data.seq_len", "64", "--model.name")


def tensors(env: DistEnv, flags: tuple[str, ...]) -> float:
    return _real_steps(flags, env.world_size, env.rank)


CASES = [
    ("context 2", 2, ""),
    ("tensor 2", 2, ""),
    ("expert 2", 2, "Qwen3MoeForCausalLM"),
    ("context 4", 4, "LlamaForCausalLM"),
    ("tensor 2", 4, ""),
    ("expert 2", 4, "Qwen3MoeForCausalLM"),
    ("tensor 2", 2, "LlamaForCausalLM"),
    ("tensor 2 context 2", 4, ""),
    ("tensor 2 expert 4", 4, "Qwen3MoeForCausalLM"),
]


@pytest.mark.needs("transformers")
@pytest.mark.parametrize(("axes", "ranks", "kind"), sample_are(CASES[2:3], CASES))
def test_planned_bytes_are_those_of_a_real_step(axes: str, ranks: int, kind: str, tmp_path: Path) -> None:
    model: tuple[str, ...] = BUILT_IN
    if kind:
        model = (*TRANSFORMERS, f"hf:{tmp_path}")
        build(kind, MIXTURE if "Moe" in kind else SIZES).save_pretrained(tmp_path)  # type: ignore[operator]
    mesh = (f"--mesh.{word}" if word.isalpha() else word for word in axes.split())
    flags = (*model, *BATCH, *mesh, "--train.global_batch", "12")
    measured = run_world(ranks, tensors, flags)
    planned = [memory_of(trace_step(ask), ask).peak for ask in _asks(flags, ranks)]
    assert planned == pytest.approx(measured, rel=0.01)
    assert all(p * (1 + MARGIN) >= m for p, m in zip(planned, measured, strict=True))


# ---------------------------------------------------------------- what falls


def of(*flags: str, rows: int) -> Plan:
    """A micro-batch of two rows a data rank on four GPUs, nothing compiled."""
    return plan("--speed.compile", "false", "--train.global_batch", str(rows), *flags)


def test_context_ranks_keep_a_part_of_each_row() -> None:
    """Logits and activations fall with the row; weights are sharded over the same four ranks."""
    long = ("--data.seq_len", "512", "--model.args.max_seq_len", "512")
    alone, divided = of(*long, rows=8), of(*long, "--mesh.context", "4", rows=2)
    kept = divided.memory.kinds["activations"] / alone.memory.kinds["activations"]
    assert kept == pytest.approx(1 / 4, rel=0.05)
    assert divided.memory.state == alone.memory.state
    assert divided.step.model_flops == pytest.approx(alone.step.model_flops / 4, rel=0.01)


def test_tensor_ranks_gather_a_part_of_each_layer() -> None:
    wide = ("--model.args.width", "512", "--model.args.heads", "8", "--data.seq_len", "8")
    alone, divided = of(*wide, rows=8), of(*wide, "--mesh.tensor", "2", rows=4)
    gathered = divided.memory.kinds["gathered"] / alone.memory.kinds["gathered"]
    assert gathered == pytest.approx(1 / 2, rel=0.02)
    assert divided.memory.state == pytest.approx(alone.memory.state, rel=0.01), "norms are whole"
    assert divided.step.model_flops == pytest.approx(alone.step.model_flops / 2, rel=0.01)
    assert divided.step.parts["communication"] > alone.step.parts["communication"]


# ---------------------------------------------------------------- links


def test_each_axis_has_its_links() -> None:
    """Two nodes of eight: tensor ranks are neighbours, context ranks of one row in both nodes."""
    rates = rates_for(load(["--plan.link_gb_s", "100", "--plan.node_link_gb_s", "100"]))
    sizes = MeshSizes("fsdp", 1, 1, context=8, tensor=2)
    within = send("all_reduce", 8e9, sizes, rates, "tensor")
    assert within == pytest.approx(2 * 4e9 / 80e9, rel=0.01)
    # four of eight ranks send half of what they have to the other node, for each of two groups
    assert send("all_to_all", 8e9, sizes, rates, "context") == pytest.approx(2 * 4 * 4e9 / 80e9, rel=0.01)


# ---------------------------------------------------------------- the search

KNOBS = "--memory.activation_checkpointing full --mesh.reshard_after_forward true --train.micro_batch 1"
LONG = "--data.seq_len 4096 --model.args.max_seq_len 4096 --plan.memory_gib 1.57"
WIDE = "--data.seq_len 8 --model.args.width 2048 --model.args.heads 16 --plan.memory_gib 2.6"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (LONG, "context 2: one row of 4,096 tokens does not fit otherwise"),
        (WIDE, "tensor 2: FSDP alone does not fit"),
        (LONG.replace("1.57", "1.6"), ""),
        (f"{LONG} --mesh.context 1", "nothing fits"),
    ],
)
def test_axes_are_tried_where_fsdp_alone_does_not_fit(
    flags: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "planned.toml"
    words = [*KNOBS.split(), *flags.split(), "--memory.cpu_offload", "false", "--plan.write", str(recipe)]
    assert main([*SMALL, "--plan.gpus", "4", *words]) == 0
    printed = capsys.readouterr().out
    axis, _, why = reason.partition(":")
    assert reason in printed
    assert bool(why) is (": " in printed and ("otherwise" in printed or "FSDP alone" in printed))
    if why:
        name, size = axis.split()
        assert f" {axis} " in printed.splitlines()[3], "the best row"
        assert getattr(load(["--config", str(recipe)]).mesh, name) == int(size)


@pytest.mark.long
@pytest.mark.needs("transformers")
def test_experts_are_divided_where_fsdp_alone_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is recomputed in backward is computed as in forward: kernels of experts have no fake tensors."""
    kind = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    more = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 64, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE | kind | more))
    model = [*TRANSFORMERS[:2], "--data.seq_len", "8", "--model.name", f"hf:{tmp_path}", "--model.weights"]
    words = [*BATCH[:4], "--speed.compile", "false", "--memory.cpu_offload", "false", "--train.global_batch"]
    fits = ["4", *KNOBS.split(), "--plan.gpus", "4", "--plan.memory_gib", "1.9"]
    assert main([*model, "none", *words, *fits]) == 0
    printed = capsys.readouterr().out
    assert "expert 2: FSDP alone does not fit" in printed
    assert " expert 2 " in printed.splitlines()[3], "the best row"
