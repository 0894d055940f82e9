"""Rows of files by number; wrong files in one line with the file, the line and a HINT."""

from __future__ import annotations

import gzip
import json
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import DataSection
from fsdp.data import build_dataset
from fsdp.tokenize import rows
from fsdp.tokenize.conversations import DocumentOptions, form_of
from fsdp.tokenize.rows import open_rows
from fsdp.tokenize.sources import Source, find_files
from tests.support.data_cache import own_cache as own_cache
from tests.tokenize.rows import texts, write_lines


def values_of(name: Path | str) -> list[dict[str, Any]]:
    return [dict(row.values) for rows in open_rows(find_files(str(name))) for row in rows.read(0, rows.count)]


def test_a_last_line_without_a_newline_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')
    assert values_of(path) == [{"text": "a"}, {"text": "b"}]


def test_compressed_lines(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "a.jsonl", texts(50)).read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain[:1000]) + gzip.compress(plain[1000:]))
    assert values_of(tmp_path / "b.jsonl.gz") == texts(50)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(plain)[:-100])
    with pytest.raises(
        ConfigError, match=r"c.jsonl.gz is damaged or cut short: .* HINT: copy it again; gzip -t"
    ):
        values_of(tmp_path / "c.jsonl.gz")


def test_a_compressed_file_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "UNPACKED", 1 << 16)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(bytes(1 << 20)))
    with pytest.raises(ConfigError, match=r"a.jsonl.gz unpacks to more than .* HINT: gunzip "):
        values_of(tmp_path / "a.jsonl.gz")


JSON = {
    "a list": json.dumps(texts(5)),
    "an object with a list": json.dumps({"version": 1, "data": texts(5)}, indent=1),
    "lines": "".join(json.dumps(row) + "\n" for row in texts(5)),
}


@pytest.mark.parametrize("form", JSON)
def test_each_form_of_a_json_file(form: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(JSON[form], encoding="utf-8-sig")
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(JSON[form].encode()))
    assert values_of(tmp_path / "a.json") == values_of(tmp_path / "b.json.gz") == texts(5)


def test_wrong_json_files_are_named(tmp_path: Path) -> None:
    for text, message in (
        ("[{]", r"a.json is not JSON in UTF-8: .* HINT: python -m json.tool"),
        ('{"a": [], "b": []}', r"a.json is an object that holds a, b list.* HINT: one list of rows"),
        ("[]", r"a.json has no rows\. HINT: rm "),
    ):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            values_of(tmp_path / "a.json")


def table(path: Path) -> None:
    """300 rows as the package datasets writes them."""
    import datasets

    rows = datasets.Dataset.from_list(texts(300))
    if path.suffix == ".arrow":
        rows.save_to_disk(str(path.parent / "saved"))
        next((path.parent / "saved").glob("*.arrow")).rename(path)
    elif path.suffix == ".zst":
        import zstandard

        path.write_bytes(zstandard.compress("".join(json.dumps(row) + "\n" for row in texts(300)).encode()))
    else:
        write: Any = {".parquet": rows.to_parquet, ".csv": rows.to_csv, ".tsv": rows.to_csv}[path.suffix]
        write(str(path), **({"sep": "\t"} if path.suffix == ".tsv" else {}))


@pytest.mark.needs("datasets", "zstandard")
@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".tsv", ".arrow", ".jsonl.zst"])
def test_tables_have_the_rows_of_lines(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    table(path)
    assert values_of(path) == texts(300)
    (rows,) = open_rows([path])
    assert [row.values for row in rows.read(25, 65)] == texts(300)[25:65]
    assert rows.cuts(1 << 30) == [300]
    assert len(rows.cuts(2000)) > 2


@pytest.mark.needs("datasets")
def test_a_table_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match=r"a.parquet cannot be read as parquet: .* HINT: copy it again"):
        values_of(tmp_path / "a.parquet")


def test_a_table_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text("text\na\n")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"a.csv needs the package datasets\. HINT: pip install datasets$"):
        values_of(tmp_path / "a.csv")


def test_a_text_file_is_a_row(tmp_path: Path) -> None:
    for name in "ba":
        (tmp_path / f"{name}.txt").write_text(f"file {name}\n", encoding="utf-8")
    assert values_of(tmp_path) == [{"text": "file a\n"}, {"text": "file b\n"}]
    (tmp_path / "b.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"b.txt is not text in UTF-8 at byte 0: .* HINT: file "):
        values_of(tmp_path)


def test_folders_and_patterns_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.jsonl", "deep/a.jsonl", ".c.jsonl"):
        write_lines(tmp_path / name, [{"text": name}])
    (tmp_path / "README.txt").write_text("of the folder", encoding="utf-8")
    (tmp_path / "labels.json").write_text("{}", encoding="utf-8")
    assert [row["text"] for row in values_of(tmp_path)] == ["b.jsonl", "deep/a.jsonl"]
    assert [row["text"] for row in values_of(tmp_path / "**/*.jsonl")] == ["b.jsonl", "deep/a.jsonl"]
    assert [row["text"] for row in values_of(tmp_path / "*.jsonl")] == ["b.jsonl"]


def test_a_file_is_cut_where_rows_begin_and_every_part_reads_its_own(tmp_path: Path) -> None:
    (rows,) = open_rows([write_lines(tmp_path / "a.jsonl", texts(300))])
    ends = rows.cuts(1000)
    assert len(ends) > 5
    parts = [rows.read(first, last) for first, last in zip([0, *ends], ends, strict=False)]
    assert [row.values for part in parts for row in part] == texts(300)


def test_a_source_may_have_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for n in range(100):
        write_lines(tmp_path / f"{n:03}.jsonl", texts(2))
    held = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + 20, limits[1]))
    try:
        assert values_of(tmp_path) == texts(2) * 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_changed_file_has_another_index(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", texts(2))
    assert len(values_of(path)) == 2
    assert len(values_of(write_lines(path, texts(9)))) == 9


WRONG: dict[str, tuple[bytes, str]] = {
    "broken": (b'{"text": "a"}\n{"text": \n{}\n', r"line 2 is not JSON .*: Expecting value.*sed -n 2p "),
    "latin": (b'{"text": "a"}\n\n{"text": "\xe9"}\n', r"line 3 is not JSON in UTF-8: .*sed -n 3p "),
    "a list": (b"[1]\n", r"line 1 is a list, not an object\. HINT: an object for each row"),
    "empty": (b"", r"a.jsonl is empty\. HINT: rm "),
    "deep": (b"[" * 100_000 + b"\n", r"line 1 is not JSON .* HINT: sed -n 1p"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_line_is_named(name: str, tmp_path: Path) -> None:
    content, message = WRONG[name]
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        values_of(tmp_path / "a.jsonl")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["{}.jsonl", "data/{}-00000-of-00001.jsonl", "{}/part.jsonl", "{}/a.txt"])
@pytest.mark.parametrize("pattern", ["", "/**/*.*"])
def test_files_of_other_splits_are_held_out(
    form: str, pattern: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for split, letter in (("train", "a"), ("validation", "b"), ("test", "c")):
        path = tmp_path / form.format(split)
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(letter * 99 if path.suffix == ".txt" else json.dumps({"text": letter * 99}))
    name = DataSection(name="documents", dir=f"{tmp_path}{pattern}", seq_len=8)
    with caplog.at_level("INFO"):
        data = build_dataset(name)
    assert data.heldout is not None
    rows = [part.batch(np.array([0, len(part) - 1]))["inputs"] for part in (data.train, data.heldout)]
    letters = [set(map(chr, part.unique().tolist())) - {"\0"} for part in rows]
    assert letters == [{"a"}, {"b", "c"}]
    assert "held out, as the name says" in caplog.text


def test_names_of_other_words_are_no_splits(tmp_path: Path) -> None:
    for name in ("training-notes", "testimony", "valley", "evaluate"):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": name}])
    assert not Source(str(tmp_path)).held_out()


def test_the_form_follows_the_columns_of_the_first_row(tmp_path: Path) -> None:
    for columns, form in (
        (["messages", "text"], "messages"),
        (["prompt", "completion"], "pairs"),
        (["text"], "text"),
    ):
        (rows,) = open_rows([write_lines(tmp_path / "a.jsonl", [dict.fromkeys(columns, "a")])])
        assert form_of(next(rows.read(0, 1)), DocumentOptions()) == form
