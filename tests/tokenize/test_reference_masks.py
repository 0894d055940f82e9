"""A file of conversations: tokens and targets are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
