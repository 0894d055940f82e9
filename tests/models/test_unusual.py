"""What is unusual about a person's model trains, or is refused in one line with a HINT; never in a traceback
of torch's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp.base.errors import ConfigError
from fsdp.base.torchvision_import import prepare_torchvision
from fsdp.config import MemorySection
from fsdp.dist.env import DistEnv
from fsdp.models.blocks import find_units
from fsdp.parallel.activations import apply_activation_checkpointing
from tests.support.runs import failures, run
from tests.support.world import run_world

HERE = "tests.models.unusual"
THREE = "--train.steps 3 --checkpoint.every_steps 1000 --optim.warmup_steps 0"


@pytest.mark.parametrize("words", ["Empty", "Empty --mesh.strategy ddp", "Orthogonal", "Unused"])
def test_it_trains(words: str, tmp_path: Path) -> None:
    """The same at two ranks and at one."""
    one, two = (run(ranks, tmp_path / str(ranks), THREE, f"--model.name {HERE}:{words}") for ranks in (1, 2))
    for name, value in one.parameters.items():
        torch.testing.assert_close(two.parameters[name], value, rtol=1e-4, atol=1e-5)


def test_a_tied_model_with_a_plain_tensor_stays_tied(tmp_path: Path) -> None:
    words = f"{THREE} --data.name {HERE}:sentences --model.name"
    plain = run(2, tmp_path / "plain", words, "tests.support.user_code:TiedWords")
    masked = run(2, tmp_path / "masked", words, f"{HERE}:TiedWithMask")
    assert torch.equal(masked.parameters["head.weight"], masked.parameters["words.weight"])
    assert all(torch.equal(masked.parameters[name], value) for name, value in plain.parameters.items())


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_part_in_eval_mode_stays_so_over_an_evaluation(strategy: str, tmp_path: Path) -> None:
    words = f"{THREE} --data.name tests.support.user_code:vectors_with_heldout --mesh.strategy {strategy}"
    losses = [
        [
            record["loss"]
            for record in run(2, tmp_path / name, words, model, often).records
            if "loss" in record
        ]
        for name, model, often in (
            ("seldom", f"--model.name {HERE}:part_in_eval_mode", ""),
            ("often", f"--model.name {HERE}:part_in_eval_mode", "--train.eval_every_steps 1"),
            ("dropping", f"--model.name {HERE}:Dropping", ""),
            ("all", f"--model.name {HERE}:all_in_eval_mode", ""),
        )
    ]
    seldom, often, dropping, whole = losses
    assert seldom == often != dropping
    assert whole == dropping  # as from_pretrained returns a model, which then trains with its dropout


def test_the_order_of_a_parameter_in_memory_changes_nothing(tmp_path: Path) -> None:
    turned, plain = (
        run(2, tmp_path / name, THREE, f"--model.name {HERE}:Transposed --model.args.plain {name}")
        for name in ("false", "true")
    )
    assert all(torch.equal(turned.parameters[name], value) for name, value in plain.parameters.items())


REFUSED = {
    "Complex": "Complex: parameter phase is complex64, which FSDP does not reduce. HINT: "
        "nn.Parameter(torch.view_as_real(",
    "Quantized": "Quantized: parameter packed is of type Packed, whose packed values cannot be cut into the "
        "shards of any number of ranks. HINT: packed as it was before quantization; --precision.frozen bf16",
    "Lazy": "Lazy: stem.weight has no shape before the first forward, but sharding comes before it."
        " HINT: nn.Linear(IN, OUT)",
    "PerSample": "the model's own loss has the shape (2,), not that of one number. HINT: return "
        "loss.mean()",
    "Unused --mesh.strategy ddp": "does not depend on extra.weight (and 1 more), and --mesh.strategy ddp "
        "reduces every "
    "gradient. HINT: --mesh.strategy fsdp, or --model.frozen extra.weight,extra.bias",
    "Words --model.args.words 20 --data.name {HERE}:sentences": "words of the model is read at ",
    "Words --model.args.positions 5 --data.name {HERE}:sentences": "places of the model is read at 8, but "
        "has rows 0 to 4",
    "Counting --memory.activation_checkpointing full": "--memory.activation_checkpointing full: the "
        "forward of blocks.0 "
    "changes its own state, blocks.0.calls, and backward would change it a second time. "
    "HINT: --memory.activation_checkpointing none",
    "Numbering --memory.activation_budget 0.5": "--memory.activation_budget 0.5: the forward of blocks.0 "
        "changes its own "
    "state, blocks.0.calls,",
    "Alternating --memory.activation_checkpointing full": "the forward of blocks.1 computes something else "
        "when backward repeats it (",
    "Alternating --memory.activation_checkpointing ops": "the forward of blocks.1 computes something else "
        "when backward repeats it (",
    "Caching --memory.activation_checkpointing ops": "--memory.activation_checkpointing ops: the forward of "
        "blocks.0 writes into its argument cache (Cache), and backward would change it a second time. HINT: ",
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_a_model_is_refused_in_a_line(words: str, tmp_path: Path) -> None:
    refused(f"--model.name {HERE}:" + words.replace("{HERE}", HERE), REFUSED[words], tmp_path)


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("kind", ["full", "ops"])
def test_recomputation_of_xlm_is_refused_with_the_module(kind: Literal["full", "ops"]) -> None:
    prepare_torchvision()
    from transformers import XLMConfig, XLMWithLMHeadModel

    sizes: Any = {"vocab_size": 50, "emb_dim": 16, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 16}
    model = XLMWithLMHeadModel(XLMConfig(**sizes)).train()
    units = find_units(model, "auto")
    apply_activation_checkpointing(units, MemorySection(activation_checkpointing=kind), root=model)
    with pytest.raises(
        ConfigError, match=r"forward of transformer.attentions.0 writes into its argument cache"
    ):
        model(torch.zeros(2, 8, dtype=torch.int64))


OTHERS = {
    f"--data.name {HERE}:float_targets": "targets are float32, but cross entropy needs class "
    "indices. HINT: return t",
    f"--data.name {HERE}:many_classes": "but the model has logits for classes 0 to 4 (-100 masks a "
    "target). HINT: a model with",
    f"--comm.reduce_scatter {HERE}:without_default": "missing a required argument: 'async_op'. HINT: it is "
    "called with "
    "(output, input, group, op, async_op=False)",
}


@pytest.mark.parametrize("words", OTHERS)
def test_data_and_hooks_are_refused_in_a_line(words: str, tmp_path: Path) -> None:
    refused(words, OTHERS[words], tmp_path)


def refused(words: str, line: str, folder: Path) -> None:
    for said in failures(2, folder / "run", words, THREE):
        assert said is not None
        assert said.startswith("ConfigError: "), said
        assert line in said
        assert "\n" not in said


def write_shards(env: DistEnv, file: str) -> None:
    mesh = init_device_mesh("cpu", (env.world_size,))
    state = {"stem.weight": distribute_tensor(torch.zeros(13, 12), mesh, [Shard(0)])}
    if env.is_main:
        torch.save(state, file)


def test_a_file_of_dtensors_is_refused(tmp_path: Path) -> None:
    run_world(2, write_shards, str(tmp_path / "shards.pt"))
    said = failures(2, tmp_path / "run", f"--model.weights {tmp_path / 'shards.pt'}")
    assert "stem.weight is a DTensor, one rank's shard. HINT: torch.save({name: tensor.full_tensor()" in (
        said[0] or ""
    ), said
