"""Rows left out are counted and listed, in a run and by --check, which shows what a run would read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import DataSection, load
from fsdp.data import build_dataset
from fsdp.data.check import check_rows
from fsdp.tokenize.conversations import DocumentOptions
from fsdp.tokenize.shards import TokenizeJob, tokenize
from tests.tokenize import chat
from tests.tokenize.chat import said, save_tokenizer

pytestmark = pytest.mark.needs("transformers")


def write(path: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps({"messages": row}) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


ODD: list[Any] = [
    said("Hi", "Hello"),
    said("no answer"),
    [*said("Hi"), {"role": "assistant", "content": "Hello", "weight": 0}],
    '{"messages": [',
    [{"role": "user", "content": [{"type": "image"}]}],
    said("a b c d e f g h i j k l m n", "Paris"),
]


def test_rows_left_out_are_counted_and_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = str(save_tokenizer(tmp_path / "tokenizer", chat.PLAIN))
    source = str(write(tmp_path / "a.jsonl", ODD))
    section: dict[str, Any] = {"name": source, "tokenizer": tokenizer, "seq_len": 64}
    message = r"a.jsonl line 4 is not .* sed -n 4p .*; or --data.args.bad_rows skip"
    with pytest.raises(ConfigError, match=message):
        tokenize(TokenizeJob(source, DocumentOptions(tokenizer)), tmp_path / "out", 1)
    with caplog.at_level(logging.INFO):
        data = build_dataset(DataSection(**section, args={"bad_rows": "skip", "heldout": 0.0}))
    assert len(data.train) == 2
    (message,) = (text for text in caplog.messages if "left out" in text)
    assert message.splitlines() == [
        "documents: 2 rows left out, without a token to train on:",
        f"  {source} line 2: no message is the assistant's",
        f"  {source} line 3: every message of the assistant is empty, or has weight 0",
        "2 bad rows left out:",
        *[line for line in message.splitlines() if " line 4 " in line or " line 5:" in line],
    ]
    # what another start has left out is in the cache, and a start that stops at it stops
    with pytest.raises(ConfigError, match=r"a.jsonl line 4 is not .* \(2 bad rows\)"):
        build_dataset(DataSection(**section, args={"heldout": 0.0}))


def test_a_first_row_that_is_broken_decides_nothing(tmp_path: Path) -> None:
    source = str(write(tmp_path / "a.jsonl", ["{", '{"text": "one"}', '{"text": 2}', '{"text": "three"}']))
    args = {"bad_rows": "skip", "rows": "document", "heldout": 0.0}
    assert len(build_dataset(DataSection(name=source, args=args)).train) == 2


def test_check_shows_what_a_run_would_read(tmp_path: Path) -> None:
    tokenizer = str(save_tokenizer(tmp_path / "tokenizer", chat.PLAIN))
    source = str(write(tmp_path / "a.jsonl", ODD))
    flags = ["--data.name", source, "--data.tokenizer", tokenizer, "--data.seq_len", "20"]
    text, stops = check_rows(load(flags))
    assert stops
    assert f"{source}: 6 rows, 2 conversations, 1 of them held out" in text
    assert "no message is the assistant's" in text
    assert f"  {source} line 4 is not an object of JSON" in text
    assert "--data.seq_len 20: cut are 1 of 2, " in text
    assert "1 of them without a token to train on before it. HINT: --data.seq_len " in text
    assert "assistant\n  ⟦Hello<|im_end|>⟧" in text
    longest = text.partition("HINT: --data.seq_len ")[2].split()[0]
    text, stops = check_rows(load([*flags, "--data.seq_len", longest, "--data.args.bad_rows", "skip"]))
    assert not stops
    assert f"--data.seq_len {longest}: nothing is cut" in text


def test_check_of_tokens_and_of_nothing(tmp_path: Path) -> None:
    source = str(write(tmp_path / "a.jsonl", ['{"text": "one"}', "{", '{"text": "two"}']))
    tokenize(TokenizeJob(source, bad_rows="skip"), tmp_path / "out", 1)
    text, stops = check_rows(load(["--data.name", str(tmp_path / "out")]))
    assert not stops  # the bad row is none of the tokens
    assert "3 rows, 2 texts, 1 of them held out" in text
    with pytest.raises(ConfigError, match=r"gone.jsonl is no file, .* HINT: ls \.$"):
        check_rows(load(["--data.name", "gone.jsonl"]))
