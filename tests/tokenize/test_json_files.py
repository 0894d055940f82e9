"""Lists of rows in .json files: the rows of the same .jsonl, wrong files in one line, memory of a block."""

from __future__ import annotations

import gzip
import json
import logging
import subprocess
import sys
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp.config import DataSection
from fsdp.data import DataSet, build_dataset
from fsdp.tokenize import json_rows, line_rows
from fsdp.tokenize.sources import find_files, left_out, open_rows
from tests.data.test_text_tokens import rows_of
from tests.support.data_cache import own_cache as own_cache
from tests.tokenize.rows import bytes_in, texts, write_lines
from tests.tokenize.test_sources import one_line, values_of

ROWS = [*texts(40), {"id": 40, "text": 'a "quote", [brackets] }\n\t\\ and é 🙂', "more": {"a": [1.5, None]}}]


def write(path: Path, content: Any, **how: Any) -> Path:
    path.write_text(json.dumps(content, **how), encoding="utf-8")
    return path


FORMS = {
    "a list": lambda rows: json.dumps(rows),
    "indented": lambda rows: json.dumps(rows, indent=2, ensure_ascii=False),
    "carriage returns": lambda rows: json.dumps(rows, indent=1).replace("\n", "\r\n"),
    "an object with a list": lambda rows: json.dumps(
        {"version": 1, "data": rows, "of": {"a": [2]}}, indent=1
    ),
    "lines": lambda rows: "".join(json.dumps(row) + "\n" for row in rows),
    "lines and blank ones": lambda rows: "\ufeff" + "\n\n".join(json.dumps(row) for row in rows),
    "objects one after another": lambda rows: "\n".join(json.dumps(row, indent=4) for row in rows),
}


SMALL = [(form, block) for form in list(FORMS)[:4] for block in (1, 7, 100)]
"""Blocks smaller than a row; how the other forms begin is seen in one block."""


@pytest.mark.parametrize(("form", "block"), [*((form, json_rows.BLOCK) for form in FORMS), *SMALL])
def test_the_rows_of_each_form(form: str, block: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(json_rows, "BLOCK", block)
    path = tmp_path / "a.json"
    path.write_text(FORMS[form](ROWS), encoding="utf-8", newline="")
    assert values_of(path) == ROWS


def test_a_byte_order_mark_and_one_row(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS), encoding="utf-8-sig")
    assert values_of(path) == ROWS
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert values_of(write(tmp_path / "b.json", chat)) == [chat]
    assert values_of(write(tmp_path / "c.json", {"text": "a", "tags": ["b"]})) == [
        {"text": "a", "tags": ["b"]}
    ]


def test_numbers_keep_their_text(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"id": 12345678901234567890123, "x": 1e400, "y": NaN}]', "utf-8")
    (row,) = values_of(tmp_path / "a.json")
    assert row["id"] == 12345678901234567890123


def test_compressed_lists(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(FORMS["lines"](ROWS).encode()))
    assert values_of(tmp_path) == 2 * ROWS


def test_places_are_elements_and_lines(tmp_path: Path) -> None:
    for form, place in (("a list", "element 3"), ("lines", "line 3")):
        (tmp_path / "a.json").write_text(FORMS[form](ROWS), encoding="utf-8")
        (rows,) = open_rows([tmp_path / "a.json"])
        assert [row.place for row in rows.read(2, 3)] == [f"{tmp_path / 'a.json'} {place}"]


NOT_JSON = r"\) is not JSON: "
WRONG: dict[str, tuple[str, str]] = {
    "a comma": (
        '[{"text": "a"},\n {"text": "b"} {}]',
        rf"a.json line 2 column 16 \(element 2{NOT_JSON}Expecting ','",
    ),
    "a word": (
        '[{"text": "a"},\n {"text": tru}, {"text": "c and much more"}]',
        rf"line 2 column 11 \(element 2{NOT_JSON}Expecting value",
    ),
    "a quote": (
        "[{'text': 'a'}, {'text': 'and so on for a while'}]",
        rf"line 1 column 3 \(element 1{NOT_JSON}Expecting property name",
    ),
    "a last comma": ('[{"text": "a"},]', rf"line 1 column 16 \(element 2{NOT_JSON}Expecting value"),
    "cut in a string": (
        '[{"text": "a"}, {"text": "b',
        r"a.json is cut short: its JSON has no end within element 2\. HINT: copy it again; tail -c 80 ",
    ),
    "cut between": ('[{"text": "a"}, ', r"cut short: its JSON has no end within element 2\."),
    "cut after": ('[{"text": "a"}', r"cut short: its JSON has no end within element 1\."),
    "more": ('[{"text": "a"}]\n[{"text": "b"}]', rf"line 2 column 1 \(element 1{NOT_JSON}Extra data"),
    "no list": (
        '{"name": "x", "size": 3}',
        r"a.json is an object that holds no list of rows\. HINT: a list .*--data.name text --data.dir ",
    ),
    "two lists": (
        '{"train": [{"text": "a"}], "test": [{"text": "b"}]}',
        r"a.json holds several lists \(train, test\)\. HINT: python -c ",
    ),
    "strings": ('["a", "b"]', r"a.json element 1 is a str, not an object with columns\. HINT: "),
    "text": ("Once upon a time", rf"line 1 column 1 \(element 1{NOT_JSON}Expecting value"),
    "nothing in it": ("[]", r"a.json has no rows\. HINT: rm "),
    "blank": (" \n\n", r"a.json has no rows\. HINT: rm "),
    "a line": (
        '{"text": "a"}\n{"text": \n{"text": "b"}',
        r"a.json line 2 is not JSON: Expecting value at character ",
    ),
    "deep": ("[" * 100_000, r"is not JSON: .*recursion"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_are_named_with_the_position(name: str, tmp_path: Path) -> None:
    content, message = WRONG[name]
    (tmp_path / "a.json").write_text(content, encoding="utf-8")
    one_line(message, lambda: values_of(tmp_path / "a.json"))


@pytest.mark.parametrize("block", [5, 4096])
def test_the_hint_shows_the_place(block: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(json_rows, "BLOCK", block)
    rows = json.dumps(ROWS, ensure_ascii=False).encode()
    at = rows.index(b"Document 7:")
    for name, broken, message in (
        (
            "a b.json",
            rows[:at] + b'" here' + rows[at:],
            r"\(element 8\) is not JSON: Expecting ',' delimiter",
        ),
        ("c.json", rows[:at] + b"\xe9 here" + rows[at:], rf"c.json is not UTF-8 at byte {at}: "),
        ("d.json.gz", gzip.compress(rows[:at] + b'" here' + rows[at:]), r"d.json.gz line 1 column "),
    ):
        path = tmp_path / name
        path.write_bytes(broken)
        error = one_line(message, partial(values_of, path))
        command = str(error.hint).removesuffix(" shows it")
        assert b" hereDocument 7" in subprocess.run(["sh", "-c", command], capture_output=True).stdout


def test_the_hint_takes_one_of_several_lists(tmp_path: Path) -> None:
    path = write(tmp_path / "a b.json", {"train": texts(3), "test": texts(2)})
    error = one_line("several lists", lambda: values_of(path))
    assert error.hint
    command = error.hint.removesuffix(" takes test alone").replace("python", sys.executable, 1)
    subprocess.run(["sh", "-c", command], check=True)
    assert values_of(tmp_path / "a b.test.jsonl") == texts(2)


def test_memory_is_a_block_and_not_the_file(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(json_rows, "BLOCK", 1 << 16)
    monkeypatch.setattr(line_rows, "READ", 1 << 16)
    path = write(tmp_path / "a.json", {"data": [{"text": "a" * 1000} for _ in range(10_000)]})
    tracemalloc.start()
    (rows,) = open_rows([path])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows.count == 10_000
    assert peak < 20 * (1 << 16) < path.stat().st_size / 5


def test_a_string_without_its_end_is_bounded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(json_rows, "BLOCK", 100)
    monkeypatch.setattr(json_rows, "LIMIT", 1000)
    (tmp_path / "a.json").write_text('[{"text": "' + "a" * 5000, encoding="utf-8")
    one_line(r"\(element 1\) is not JSON: a value of more than 1,000 characters", lambda: values_of(tmp_path))


# ---------------------------------------------------------------- folders and runs


def test_a_folder_has_its_json_files_unless_others_are_its_rows(tmp_path: Path) -> None:
    write(tmp_path / "b.json", texts(2))
    write(tmp_path / "dataset_info.json", {"features": {}})
    assert [path.name for path in find_files(str(tmp_path))] == ["b.json"]
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    assert [path.name for path in find_files(str(tmp_path))] == ["a.txt"]
    write(tmp_path / "c.json", texts(2))
    assert [path.name for path in find_files(str(tmp_path))] == ["b.json", "c.json"]
    assert not left_out(str(tmp_path))
    write_lines(tmp_path / "d.jsonl", texts(2))
    assert [path.name for path in find_files(str(tmp_path))] == ["d.jsonl"]
    assert left_out(str(tmp_path)).startswith(
        f"2 .json files are left out beside the other files of {tmp_path}"
    )


def data(name: Path | str) -> DataSet:
    return build_dataset(DataSection(name=str(name), seq_len=8))


@pytest.mark.slow
def test_a_run_reads_the_samples_of_the_same_lines(
    tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    lines = data(write_lines(tmp_path / "a.jsonl", ROWS))
    folder = tmp_path / "rows"
    folder.mkdir()
    for one in (write(tmp_path / "a.json", ROWS), write(folder / "a.json", {"data": ROWS}).parent):
        found = data(one)
        assert found.info.kind == "text"
        assert np.array_equal(rows_of(found.train), rows_of(lines.train))
    assert not caplog.messages
    write_lines(folder / "b.jsonl", ROWS)
    data(folder)
    assert any("1 .json files are left out" in message for message in caplog.messages)


@pytest.mark.slow
def test_the_command_writes_the_same_tokens(tmp_path: Path, own_cache: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ROWS)
    write(tmp_path / "b.json", ROWS)
    for name in ("a.jsonl", "b.json"):
        out = str(tmp_path / name[0])
        done = subprocess.run(
            [sys.executable, "-m", "fsdp.tokenize", str(tmp_path / name), out, "--workers", "2"]
        )
        assert done.returncode == 0
    assert bytes_in(tmp_path / "a", "train") == bytes_in(tmp_path / "b", "train")
