"""A file of conversations: tokens and targets are those of transformers and of TRL's SFTTrainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp.base.torch_private import prepare_torchvision
from fsdp.config import DataSection
from fsdp.data import build_dataset
from tests.tokenize.chat import STYLES, ChatStyle, said, save_tokenizer
from tests.tokenize.rows import in_this_process as in_this_process
from tests.tokenize.rows import write_lines

pytestmark = [pytest.mark.needs("transformers"), pytest.mark.usefixtures("in_this_process")]

SEQ_LEN = 95


WITHOUT_SYSTEM = [
    said("the capital of France?", "the capital is Paris."),
    said("Hello", "Hello there, hów are you?", "well", "是的 🙂"),
    said("a", "b", "c", "b", "nobody answers the last"),
    said("system", "two\n\nparagraphs <b>of</b> it", "more", "user\nassistant"),
    said("  Hello ", "\n\n  Hello there  \n", "a\n", " \tb"),
]
WITH_SYSTEM = [said("Hello", "Hello there", "again", "there", system="be the assistant")]
PAIRS = [("the capital of France is", " Paris"), ("Hello", " there,\nhow are you?"), ("é=", "e acute")]

Sample = tuple[list[int], list[int]]
"""Tokens and labels of equal length; -100 is a token that is not trained on."""


def conversations(style: ChatStyle) -> list[list[dict[str, Any]]]:
    return [*WITHOUT_SYSTEM, *(WITH_SYSTEM if style.systems else [])]


def of_shardrun(path: Path, tokenizer: Path, seq_len: int = SEQ_LEN) -> list[Sample]:
    """The samples of --data.name FILE with the first token, whose target no model sees, masked."""
    section = DataSection(name=str(path), tokenizer=str(tokenizer), seq_len=seq_len, args={"heldout": 0})
    made = build_dataset(section)
    batch = made.train.batch(np.arange(len(made.train)))
    end = made.info.preprocess["end"]
    samples = []
    for inputs, targets in zip(batch["inputs"].tolist(), batch["targets"].tolist(), strict=True):
        tokens = [*inputs, targets[-1] if targets[-1] >= 0 else end]
        samples.append((tokens, [-100, *targets]))
    return samples


def assert_same(ours: list[Sample], theirs: list[Sample], end: int, seq_len: int = SEQ_LEN) -> None:
    """Ours are padded with the end token to seq_len."""
    assert len(ours) == len(theirs)
    for (tokens, labels), (ids, wanted) in zip(ours, theirs, strict=True):
        missing = seq_len + 1 - len(ids)
        assert missing > 0
        assert tokens == [*ids, *[end] * missing]
        assert labels == [-100, *wanted[1:], *[-100] * missing]
        assert any(label >= 0 for label in labels)


CALL = {"type": "function", "function": {"name": "capital", "arguments": {"of": "France"}}}
WITH_TOOLS = [
    {"role": "user", "content": "the capital of France?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "Paris"},
    {"role": "assistant", "content": "the capital is Paris."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello there", "tool_calls": [CALL, CALL]},
]
TOOLS = [{"type": "function", "function": {"name": "capital", "parameters": {}}}]


def labelled(ids: list[int], mask: list[int]) -> Sample:
    return ids, [token if one else -100 for token, one in zip(ids, mask, strict=True)]


@pytest.mark.parametrize("published", [False, True], ids=["marked", "as published"])
@pytest.mark.parametrize("name", STYLES)
def test_a_file_of_conversations_is_as_transformers_masks_it(
    name: str, published: bool, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    style = STYLES[name]
    template = style.plain if published else style.marked
    folder = save_tokenizer(tmp_path / "tokenizer", template, style.eos, style.special)
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    rows = conversations(style)
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": one} for one in rows])
    expected = []
    for one in rows:
        made = theirs.apply_chat_template(
            one, chat_template=style.marked, return_assistant_tokens_mask=True, return_dict=True
        )
        expected.append(labelled(made["input_ids"], made["assistant_masks"]))
    assert_same(of_shardrun(path, folder), expected, theirs.eos_token_id)


@pytest.mark.parametrize("published", [False, True], ids=["marked", "as published"])
def test_tools_and_their_calls_are_as_transformers_masks_them(published: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    style = STYLES["tools"]
    folder = save_tokenizer(tmp_path / "tokenizer", style.plain if published else style.marked, style.eos)
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    row = {"messages": WITH_TOOLS, "tools": TOOLS}
    path = write_lines(tmp_path / "chats.jsonl", [row])
    made = theirs.apply_chat_template(
        WITH_TOOLS,
        tools=TOOLS,
        chat_template=style.marked,
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    expected = labelled(made["input_ids"], made["assistant_masks"])
    assert_same(of_shardrun(path, folder, 400), [expected], theirs.eos_token_id, 400)


def of_trl(path: Path, tokenizer: Path, out: Path, **options: Any) -> list[Sample]:
    """The batch of SFTTrainer's own preparation and collator, cut where its padding begins."""
    prepare_torchvision()
    from datasets import load_dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    made: Any = AutoTokenizer.from_pretrained(tokenizer)
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(made), **sizes))
    config = SFTConfig(
        output_dir=str(out), use_cpu=True, bf16=False, report_to=[], max_length=SEQ_LEN, **options
    )
    cache = str(out / "cache")
    rows: Any = load_dataset("json", data_files=str(path), split="train", cache_dir=cache)
    trainer: Any = SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=made)
    batch = trainer.data_collator([trainer.train_dataset[n] for n in range(len(rows))])
    return [
        (ids[mask.bool()].tolist(), labels[mask.bool()].tolist())
        for ids, labels, mask in zip(
            batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True
        )
    ]


def end_of(tokenizer: Path) -> int:
    from transformers import AutoTokenizer

    end: int = AutoTokenizer.from_pretrained(tokenizer).eos_token_id
    return end


@pytest.mark.needs("trl")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["chatml", *(pytest.param(n, marks=pytest.mark.long) for n in list(STYLES)[1:])]
)
def test_a_file_of_conversations_is_as_trl_trains_on_it(name: str, tmp_path: Path) -> None:
    style = STYLES[name]
    rows = conversations(style)
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": one} for one in rows])
    marked, plain = (
        save_tokenizer(tmp_path / form, text, style.eos, style.special)
        for form, text in (("marked", style.marked), ("plain", style.plain))
    )
    expected = of_trl(path, marked, tmp_path / "trl", assistant_only_loss=True)
    end = end_of(marked)
    assert_same(of_shardrun(path, marked), expected, end)
    assert_same(of_shardrun(path, plain), expected, end)


@pytest.mark.needs("trl")
@pytest.mark.long
def test_prompts_and_completions_are_as_trl_trains_on_them(tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS]
    path = write_lines(tmp_path / "pairs.jsonl", rows)
    folder = save_tokenizer(tmp_path / "tokenizer", None)
    expected = of_trl(path, folder, tmp_path / "trl", completion_only_loss=True)
    assert_same(of_shardrun(path, folder), expected, end_of(folder))
