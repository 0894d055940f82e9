"""Held-out questions answered at evaluations: those of transformers' generate, on sharded models, and a
training of the same bits.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fsdp.predict.__main__ import main
from fsdp.run.answers import held_out_questions, maybe_answers
from fsdp.rundir.history import RunDir
from tests.support.data_cache import on_a_rank
from tests.support.data_cache import own_cache as own_cache
from tests.support.world import run_world
from tests.tokenize.chat import STYLES, said, save_tokenizer
from tests.tokenize.rows import write_lines

CITIES = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo", "Japan": "Tokyo"}
CHATS = [
    {"messages": said(f"Number {n}, the capital of {land}?", f"{n}: {CITIES[land]}.")}
    for n, land in enumerate([*CITIES] * 8)
]
STEPS = (
    "--data.seq_len 64 --train.steps 6 --train.global_batch 8 --train.eval_every_steps 3 --optim.lr 1e-2 "
    "--optim.warmup_steps 1 --watch.enabled false --data.args.heldout 0.2 --checkpoint.every_steps 1000"
)


def chat_model(folder: Path, kind: str = "llama") -> Path:
    """Its template ends a turn by a token that is not config.json's."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    style = STYLES["chatml"]
    save_tokenizer(folder, style.plain, style.eos, style.special)
    model: Any
    sizes: dict[str, Any]
    if kind == "gpt2":  # a table of positions
        sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=352, bos_token_id=0, eos_token_id=0, **sizes))
    else:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=352, num_key_value_heads=1, **sizes))
    model.generation_config.update(eos_token_id=None, bos_token_id=None)
    model.save_pretrained(folder)
    return folder


def trained(run: Path, cache: Path, *words: str) -> tuple[list[Any], list[dict[str, Any]]]:
    """Losses and norms on two ranks, and the answers."""
    assert run_world(2, on_a_rank, ["--run.dir", str(run), *words, *STEPS.split()], str(cache)) == [
        None,
        None,
    ]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    answers = run / "answers.jsonl"
    rows = [json.loads(line) for line in answers.read_text().splitlines()] if answers.exists() else []
    return [(line.get("loss"), line.get("eval_loss"), line.get("grad_norm")) for line in lines], rows


def of_transformers(export: Path, messages: list[dict[str, str]], tokens: int) -> tuple[str, str]:
    """The question and the greedy answer of an export, as a person would ask it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(export)
    model: Any = AutoModelForCausalLM.from_pretrained(export)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    batch = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    size = batch["input_ids"].shape[1]
    most = min(tokens, model.config.max_position_embeddings - size)
    found = model.generate(**batch, max_new_tokens=most, do_sample=False, **ends)[0]
    parts = tokenizer.batch_decode([found[:size], found[size:]], skip_special_tokens=True)
    return parts[0].strip(), parts[1].strip()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.parametrize(("kind", "rows"), [("llama", "packed"), ("gpt2", "document")])
def test_answers_of_a_sharded_chat_model(kind: str, rows: str, tmp_path: Path, own_cache: Path) -> None:
    model = chat_model(tmp_path / "model", kind)
    path = write_lines(tmp_path / "chats.jsonl", CHATS)
    words = ["--model.name", f"hf:{model}", "--data.name", str(path), "--data.args.rows", rows]
    expected, nothing = trained(tmp_path / "off", own_cache, *words, "--train.eval_answers", "0")
    found, answers = trained(tmp_path / "run", own_cache, *words, "--train.eval_answers", "3")
    assert found == expected
    assert not nothing
    assert [row["step"] for row in answers] == [3] * 3 + [6] * 3
    known = {row["messages"][1]["content"]: row["messages"][:1] for row in CHATS}
    assert len({row["question"] for row in answers}) == 3
    for row in answers[3:]:
        question, answer = of_transformers(tmp_path / "run" / "full_model", known[row["reference"]], 128)
        assert row["question"] == question
        # in a batch the table of positions ends with the longest question
        assert row["answer"] == (answer if kind == "llama" else answer[: len(row["answer"])])


def test_ranks_that_share_rows_say_at_the_start_why_nothing_is_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sizes = SimpleNamespace(tensor=2, context=1)
    parts: Any = SimpleNamespace(job=SimpleNamespace(sizes=sizes), run=RunDir(Path("run")))
    with caplog.at_level("INFO"):
        assert maybe_answers(parts) is None
    (line,) = caplog.messages
    assert "ranks share each row (tensor 2, context 1). HINT: python -m fsdp.predict run, after" in line


def test_a_model_without_generate_answers_pairs(
    tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [{"prompt": f"{n}+{n}=", "completion": f"{2 * n};"} for n in range(20)]
    path = write_lines(tmp_path / "pairs.jsonl", pairs)
    words = ["--model.name", "transformer", "--model.preset", "toy", "--data.name", str(path)]
    _, answers = trained(tmp_path / "run", own_cache, *words)
    row = answers[-1]
    assert {"prompt": row["question"], "completion": row["reference"]} in pairs
    capsys.readouterr()
    flags = ["--prompt", row["question"], "--temperature", "0", "--tokens", "128"]
    assert main([str(tmp_path / "run"), *flags]) == 0
    assert capsys.readouterr().out.replace(r"\x00", "").strip() == row["question"] + row["answer"]


class Row:
    """One packed row: a text, a question cut by nothing, and one whose reference the row's end cuts."""

    targets = [1, 2, -100, -100, 5, 6, -100, -100, 9, 10]  # noqa: RUF012
    positions = [0, 1, 0, 1, 2, 3, 0, 1, 2, 3]  # noqa: RUF012

    def __len__(self) -> int:
        return 3

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        import torch

        assert len(indices) == 1
        row = {"inputs": [*range(10)], "targets": self.targets, "position_ids": self.positions}
        return {name: torch.tensor([values]) for name, values in row.items()}


def test_a_question_is_whole_and_begins_at_its_document() -> None:
    (found,) = held_out_questions(Row(), 4)
    assert (found.prompt, found.reference) == ([2, 3, 4], [5, 6])
