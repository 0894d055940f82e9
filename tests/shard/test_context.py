"""Rows divided over context ranks against whole rows: packed ones against a loop that takes each document
alone, others against one process; and the models that are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fsdp.models.init import Init, Normal
from fsdp.models.registry import IGNORED, POSITIONS, ROW_POSITIONS
from fsdp.models.transformer import Transformer, TransformerSizes
from fsdp.shard.context import cut_rows
from tests.models import small_hf
from tests.run import test_packed_runs as packed
from tests.support.data_cache import own_cache as own_cache
from tests.support.marks import quick_are
from tests.support.runs import failures, finished, flags, on_a_rank, run
from tests.support.world import run_world

STEPS = "--precision.master fp64 --train.global_batch 8 --train.steps 3 --optim.lr 1e-2"
TOKENS = f"{STEPS} --data.name synthetic --data.args.kind tokens --data.args.vocab_size 32 --data.seq_len 15"
BUILT_IN = "--model.name transformer --model.args.width 32 --model.args.heads 4 --model.args.kv_heads 2"
HALF = "--precision.master fp32 --precision.param bf16"
HSDP = "--mesh.strategy hsdp --mesh.replicate 2"

QUICK = [("transformer", "texts", 2, "")]
ALL = [*QUICK, ("llama", "pairs", 4, HSDP), ("mistral", "texts", 4, "--train.micro_batch 3")]


@pytest.mark.needs("transformers")
@pytest.mark.parametrize(("model", "kind", "ranks", "more"), quick_are(QUICK, ALL, [ALL[2]]))
def test_packed_rows_in_parts_are_as_each_document_alone(
    model: str, kind: str, ranks: int, more: str, tmp_path: Path, own_cache: Path
) -> None:
    divided = ["--mesh.context", "2", *more.split()]
    packed.check_one_step(model, kind, ranks, tmp_path, own_cache, *divided)


class Labelled(Dataset[dict[str, Tensor]]):
    """Rows as models of transformers get them: labels are the tokens, which the model shifts."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 32, (15,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def labelled() -> tuple[Labelled, Labelled]:
    return Labelled(), Labelled()


HF = f"--model.name tests.run.test_packed_runs:llama --data.name tests.shard.test_context:labelled {STEPS}"
ROWS = [
    (2, f"{BUILT_IN} {TOKENS}", "--mesh.context 2"),
    (
        4,
        f"{BUILT_IN} {TOKENS}",
        "--mesh.context 4 --train.micro_batch 4 --memory.activation_checkpointing full",
    ),
    (4, f"{BUILT_IN} {TOKENS} --optim.ema 0.9", "--mesh.context 2 --train.micro_batch 2"),
    (2, HF, "--mesh.context 2 --train.micro_batch 4"),
]


@pytest.mark.needs("transformers")
@pytest.mark.parametrize(("ranks", "whole", "divided"), quick_are(ROWS[:1], ROWS, []))
def test_rows_of_an_odd_length_are_as_in_one_process(
    ranks: int, whole: str, divided: str, tmp_path: Path
) -> None:
    """15 positions, which no axis divides; two heads of keys for four ranks; evaluated by the same ranks."""
    one = run(1, tmp_path / "one", whole)
    parts = run(ranks, tmp_path / "parts", whole, divided)
    for name in ("loss", "grad_norm", "eval_loss", "eval_accuracy", "eval_ema_loss", "tokens"):
        theirs = [record[name] for record in one.records if name in record]
        assert [record[name] for record in parts.records if name in record] == pytest.approx(
            theirs, rel=1e-12
        )
    for name, value in one.parameters.items():
        assert torch.allclose(parts.parameters[name], value, rtol=0, atol=1e-10), name


def test_labels_are_shifted_before_a_row_is_cut() -> None:
    data = {"inputs": torch.arange(7).view(1, 7), "labels": torch.arange(10, 17).view(1, 7)}
    parts = [cut_rows(data, contexts=2, context=at, shifts=True) for at in range(2)]
    assert [part["inputs"][0].tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 0]]
    wanted = [[11, 12, 13, 14], [15, 16, IGNORED, IGNORED]]
    assert [part["targets"][0].tolist() for part in parts] == wanted
    assert [part[POSITIONS][0].tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 0]]
    assert all(part[ROW_POSITIONS][0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0] for part in parts)


def lfm2() -> nn.Module:
    """Its short convolutions mix tokens; in a random model by less than rounding in fp32."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    sizes = {**small_hf.SIZES, "vocab_size": 32, "num_key_value_heads": 2}
    return Lfm2ForCausalLM(Lfm2Config(**sizes, layer_types=["conv", "full_attention"], use_cache=False))


def gemma2() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {**small_hf.SIZES, "vocab_size": 32, "num_key_value_heads": 2}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, head_dim=12, use_cache=False))


def lfm2_moe() -> nn.Module:
    """In bf16 the order of its experts' products changes logits by more than its convolutions do."""
    from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

    sizes: dict[str, Any] = {**small_hf.SIZES, "vocab_size": 32, "num_key_value_heads": 2}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 0}
    layers = ["full_attention", "conv"]
    return Lfm2MoeForCausalLM(Lfm2MoeConfig(**sizes, layer_types=layers, use_cache=False))


class Unplaced(Transformer):
    """Reads no positions, and computes them from the length of what it has."""

    def forward(self, tokens: Tensor, position_ids: Any = None, rows: Any = None) -> Tensor:
        return super().forward(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), rows)

    def param_inits(self) -> dict[str, Init]:
        return {name: Normal(0.3) for name, _ in self.named_parameters()}


def unplaced() -> nn.Module:
    return Unplaced(TransformerSizes(vocab_size=32, width=32, heads=4, max_seq_len=16))


REFUSED = [
    (
        f"--model.name tests.shard.test_context:lfm2_moe {TOKENS} {HALF}",
        *(2, "layers.1.conv mixes tokens beside attention", "1"),
    ),
    (
        f"--model.name tests.shard.test_context:unplaced {TOKENS} {HALF}",
        *(2, "logits of a part of a row differ by", "1"),
    ),
    (f"{BUILT_IN} {TOKENS} --train.loss os:getcwd", 2, "--train.loss os:getcwd do not go together", "1"),
    (f"{BUILT_IN} {TOKENS} --mesh.context 3", 3, "--mesh.context 3 does not divide the 4 query heads", "2"),
    (
        f"--model.name tests.shard.test_context:lfm2 {TOKENS}",
        2,
        "layers.0.conv mixes tokens beside attention",
        "1",
    ),
    (f"--model.name tests.shard.test_context:gemma2 {TOKENS}", 2, "it has softcap", "1"),
    ("--model.name mlp", 2, "it is neither the built-in transformer nor a model of transformers", "1"),
]


@pytest.mark.needs("transformers")
@pytest.mark.parametrize(("flags", "ranks", "said", "fits"), REFUSED)
def test_what_cannot_be_divided_is_refused(
    flags: str, ranks: int, said: str, fits: str, tmp_path: Path
) -> None:
    asked = "" if "--mesh.context" in flags else "--mesh.context 2"
    for one in failures(ranks, tmp_path / "run", flags, asked, "--train.global_batch 4 --train.steps 1"):
        assert one is not None
        assert said in one
        assert one.endswith(f"HINT: --mesh.context {fits}")


@pytest.mark.slow
def test_a_run_of_four_shards_continues_as_two_with_two_parts_of_rows(tmp_path: Path) -> None:
    """And back to one rank; the steps after each change are those of one process."""
    words = (BUILT_IN, TOKENS.replace("--train.steps 3", "--train.steps 6"), "--checkpoint.every_steps 2")
    whole = run(1, tmp_path / "whole", *words)
    for ranks, more in ((4, "--train.stop_after 2"), (4, "--mesh.context 2 --train.stop_after 4"), (1, "")):
        given = ["--run.dir", str(tmp_path / "run"), *flags(*words, more)]
        assert run_world(ranks, on_a_rank, given) == [None] * ranks
    resumed = finished(tmp_path / "run")
    for name in ("loss", "grad_norm"):
        theirs = [record[name] for record in whole.records if name in record]
        ours = [record[name] for record in resumed.records if name in record]
        assert ours == pytest.approx(theirs, rel=1e-10)
    for name, value in whole.parameters.items():
        assert torch.allclose(resumed.parameters[name], value, rtol=0, atol=1e-9), name
