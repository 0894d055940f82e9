"""Runs on packed rows against a loop that takes each document alone, with the samples written out here."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp.config import ModelSection
from fsdp.models import build_real, resolve
from fsdp.models.loss import read_output
from fsdp.models.transformer import Transformer, TransformerSizes
from tests.data.test_documents import on_a_rank
from tests.support.data_cache import own_cache as own_cache
from tests.support.marks import quick_are
from tests.support.runs import finished
from tests.support.world import run_world
from tests.tokenize.rows import write_lines

SEQ_LEN, BYTES = 16, 256
RATE = 0.5
MODELS = {
    "transformer": ["--model.name", "transformer", "--model.preset", "toy", "--model.args.kv_heads", "2"],
    "llama": ["--model.name", "tests.run.test_packed_runs:llama"],
    "mistral": ["--model.name", "tests.run.test_packed_runs:mistral"],
    "gpt2": ["--model.name", "tests.run.test_packed_runs:gpt2"],
}
TEXTS = [f"{'upon a time '[: n % 13]}{n}" for n in range(28)] + ["once upon a time, long ago", "", "x" * 16]
PAIRS = [(f"{n}+{n}=", f"{2 * n}") for n in range(20)] + [("a long question", "and its answer")]
FLAGS = (
    "--data.args.heldout 0 --train.clip_grad_norm 0 --precision.master fp64 --optim.name sgd "
    f"--optim.momentum 0 --optim.schedule constant --optim.warmup_steps 0 --optim.lr {RATE} "
    f"--watch.enabled false --checkpoint.every_steps 1000 --data.seq_len {SEQ_LEN} --data.args.rows packed"
).split()
SIZES: dict[str, Any] = {
    "vocab_size": BYTES,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def llama() -> nn.Module:
    """With torch's norm: transformers' own computes in float32, and rounds gradients by their factor."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return exact(LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1, intermediate_size=40)))


def mistral() -> nn.Module:
    """A token sees itself and two before it, within its document."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes: dict[str, Any] = {"num_key_value_heads": 1, "intermediate_size": 40, "sliding_window": 3}
    return exact(MistralForCausalLM(MistralConfig(**SIZES, **sizes)))


def exact(model: nn.Module) -> nn.Module:
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            model.set_submodule(name, nn.RMSNorm(SIZES["hidden_size"], eps=1e-6))
    return model


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": SEQ_LEN,
        "bos_token_id": 0,
    }
    dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=BYTES, eos_token_id=0, **sizes, **dropout))


def opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(OPTConfig(**SIZES, word_embed_proj_dim=24, ffn_dim=40))


def chunked() -> nn.Module:
    """As Llama 4, in chunks that its rows reach."""
    model = Transformer(TransformerSizes(vocab_size=BYTES, width=16, layers=1, heads=2, max_seq_len=SEQ_LEN))
    model.config = SimpleNamespace(attention_chunk_size=SEQ_LEN // 2)  # type: ignore[assignment]
    return model


def of_texts() -> list[tuple[list[int], list[int]]]:
    """(tokens, targets) of each document, in pieces of seq_len."""
    whole = [[*text.encode(), 0] for text in TEXTS if text]
    return [
        (tokens[at : at + SEQ_LEN][: len(tokens) - 1 - at], tokens[at + 1 :][:SEQ_LEN])
        for tokens in whole
        for at in range(0, len(tokens) - 1, SEQ_LEN)
    ]


def of_pairs() -> list[tuple[list[int], list[int]]]:
    """Cut at seq_len; the prompt is no target."""
    found = []
    for prompt, completion in PAIRS:
        tokens = [*prompt.encode(), *completion.encode(), 0][: SEQ_LEN + 1]
        targets = [-100 if n < len(prompt) else token for n, token in enumerate(tokens)]
        found.append((tokens[:-1], targets[1:]))
    return found


def documents(kind: str) -> list[tuple[list[int], list[int]]]:
    return of_texts() if kind == "texts" else of_pairs()


def write(kind: str, folder: Path) -> Path:
    rows: list[Any] = [{"text": text} for text in TEXTS]
    if kind == "pairs":
        rows = [{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS]
    return write_lines(folder / "a.jsonl", rows)


@functools.cache
def plain(model: str, kind: str) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """The mean loss over all documents, each alone in its forward; its gradients, and the initial weights."""

    flags = dict(zip(MODELS[model][::2], MODELS[model][1::2], strict=True))
    args = {name.rpartition(".")[2]: int(v) for name, v in flags.items() if name.startswith("--model.args")}
    section = ModelSection(name=flags["--model.name"], preset=flags.get("--model.preset", ""), args=args)
    module = build_real(resolve(section, {"vocab_size": BYTES, "seq_len": SEQ_LEN}), 0).double()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    total, count = torch.zeros((), dtype=torch.float64), 0
    for tokens, targets in documents(kind):
        logits = read_output(module(torch.tensor([tokens]))).logits
        assert logits is not None
        total = total + F.cross_entropy(logits[0], torch.tensor(targets), reduction="sum")
        count += sum(target != -100 for target in targets)
    (total / count).backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return float(total.detach()) / count, gradients, before


def errors(ranks: int, folder: Path, path: Path, cache: Path, *more: str) -> list[str | None]:
    words = ["--run.dir", str(folder), "--data.name", str(path), *FLAGS, *more]
    found: list[str | None] = run_world(ranks, on_a_rank, words, str(cache))
    return found


def train(ranks: int, folder: Path, path: Path, cache: Path, *more: str) -> None:
    said = errors(ranks, folder, path, cache, *more)
    assert said == [None] * ranks, said


def refused(ranks: int, model: str, folder: Path, cache: Path, *more: str) -> list[str | None]:
    words = ["--train.global_batch", "4", "--model.name", model, *more]
    return errors(ranks, folder / "run", write("texts", folder), cache, *words)


CASES = [(m, kind, ranks) for m in MODELS for kind in ("texts", "pairs") for ranks in (1, 2, 3)]
QUICK = [("transformer", "texts", 2)]
SAMPLE = [("llama", "texts", 3), ("transformer", "pairs", 3)]


@pytest.mark.needs("transformers")
@pytest.mark.parametrize(("model", "kind", "ranks"), quick_are(QUICK, CASES, SAMPLE))
def test_packed_is_as_each_document_alone(
    model: str, kind: str, ranks: int, tmp_path: Path, own_cache: Path
) -> None:
    """The micro-batches of 3 ranks have padding."""
    check_one_step(model, kind, ranks, tmp_path, own_cache)


def check_one_step(model: str, kind: str, ranks: int, tmp_path: Path, own_cache: Path, *more: str) -> None:
    """On all rows, against the plain loop."""
    path = write(kind, tmp_path)
    loss, gradients, before = plain(model, kind)
    made = ["--train.steps", "1", *MODELS[model]]
    train(1, tmp_path / "plan", path, own_cache, *made, "--train.global_batch", "1")
    start = json.loads((tmp_path / "plan/history.jsonl").read_text().splitlines()[0])
    rows = int(start["data"]["samples"])
    train(ranks, tmp_path / "run", path, own_cache, *made, "--train.global_batch", str(rows), *more)
    done = finished(tmp_path / "run")
    assert rows < 0.7 * len(documents(kind))
    assert done.records[0]["loss"] == pytest.approx(loss, rel=1e-12)
    for name, expected in gradients.items():
        found = (before[name] - done.parameters[name]) / RATE
        assert torch.allclose(found, expected, rtol=0, atol=1e-12), name


@pytest.mark.slow
@pytest.mark.needs("transformers")
def test_a_model_whose_documents_see_each_other_does_not_train(tmp_path: Path, own_cache: Path) -> None:
    for one in refused(2, "tests.run.test_packed_runs:opt", tmp_path, own_cache):
        assert one is not None
        assert "its attention crosses the documents of packed rows" in one
        assert one.endswith("HINT: --data.args.rows document")


@pytest.mark.parametrize("how", ["", "--train.evaluate_only true --data.args.heldout 0.2 --model.weights "])
def test_attention_in_chunks_reads_no_packed_rows(how: str, tmp_path: Path, own_cache: Path) -> None:
    torch.save(chunked().state_dict(), tmp_path / "weights.pt")
    more = f"{how}{tmp_path}/weights.pt".split() if how else []
    for said in refused(2, "tests.run.test_packed_runs:chunked", tmp_path, own_cache, *more):
        assert said is not None
        assert "attends in chunks of 8 tokens of a row (attention_chunk_size)" in said
        assert said.endswith(f"or --data.seq_len {SEQ_LEN // 2}")


def test_a_model_without_positions_does_not_start(tmp_path: Path, own_cache: Path) -> None:
    (said,) = refused(1, "torch.nn:Identity", tmp_path, own_cache)
    assert said is not None
    assert "forward of Identity has no parameter position_ids" in said
