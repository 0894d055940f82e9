"""A model's folder gives the tokenizer of data that are tokenized on first use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp.config import DataSection, MixedSource, ModelSection
from fsdp.data.registry import with_model_tokenizer

ROWS = '{"text": "a"}\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = write_tokenizer(tmp_path / "model", {"a": 0, "b": 1, "</s>": 2})
    (found / "config.json").write_text("{}")
    for name in ("rows.jsonl", "notes.txt", "notes.md"):
        (tmp_path / name).write_text(ROWS)
    return found


def write_tokenizer(folder: Path, vocabulary: dict[str, int]) -> Path:
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    return folder


def tokenizer_of(data: DataSection, model: ModelSection) -> str:
    return with_model_tokenizer(data, model).tokenizer


@pytest.mark.parametrize("name", ["rows.jsonl", "*.jsonl", "notes.txt"])
def test_rows_and_text_files_take_it(name: str, folder: Path) -> None:
    model = ModelSection(name=f"hf:{folder}")
    assert tokenizer_of(DataSection(name=str(folder.parent / name)), model) == str(folder)


def test_a_folder_of_rows_takes_it_until_it_is_tokenized(folder: Path) -> None:
    model = ModelSection(name=f"hf:{folder}")
    data = DataSection(name="documents", dir=str(folder.parent))
    assert tokenizer_of(data, model) == str(folder)
    (folder.parent / "tokenize.json").write_text("{}")
    assert tokenizer_of(data, model) == ""


def test_other_data_take_none(folder: Path) -> None:
    model = ModelSection(name=f"hf:{folder}")
    bytes_of_a_text = DataSection(name="text", dir=str(folder.parent / "notes.txt"))
    assert tokenizer_of(bytes_of_a_text, model) == ""
    for name in (str(folder.parent / "notes.md"), "digits", "tests.models.small_hf:texts"):
        assert tokenizer_of(DataSection(name=name), model) == "", name


def test_a_mixture_takes_it_where_every_source_does(folder: Path) -> None:
    rows = MixedSource(name=str(folder.parent / "rows.jsonl"), label="rows")
    model = ModelSection(name=f"hf:{folder}")
    assert tokenizer_of(DataSection(sources=(rows, rows)), model) == str(folder)
    assert tokenizer_of(DataSection(sources=(rows, MixedSource(name="digits", label="d"))), model) == ""
