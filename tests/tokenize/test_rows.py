"""Rows of files, tables and objects; wrong files in one line with the file, the line and a HINT."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import DataSection
from fsdp.data import build_dataset
from fsdp.tokenize import rows
from fsdp.tokenize.rows import Source, find_files, open_rows
from tests.support.data_cache import own_cache as own_cache
from tests.tokenize.rows import rows_in, texts, write_lines

ROOT = Path(__file__).parents[2]


def values_of(name: Path | str) -> list[dict[str, Any]]:
    return rows_in(open_rows(find_files(str(name))))


def test_a_last_line_without_a_newline_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')
    assert values_of(path) == [{"text": "a"}, {"text": "b"}]


def test_compressed_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = write_lines(tmp_path / "a.jsonl", texts(50)).read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain[:1000]) + gzip.compress(plain[1000:]))
    assert values_of(tmp_path / "b.jsonl.gz") == texts(50)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(plain)[:-100])
    with pytest.raises(ConfigError, match=r"c.jsonl.gz is damaged: .* HINT: gzip -t"):
        values_of(tmp_path / "c.jsonl.gz")
    monkeypatch.setattr(rows, "UNPACKED", 1 << 16)
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(bytes(1 << 20)))
    with pytest.raises(ConfigError, match=r"d.jsonl.gz unpacks to more than .* HINT: ls -l "):
        values_of(tmp_path / "d.jsonl.gz")


JSON = {"a list": json.dumps(texts(5)), "lines": "".join(json.dumps(row) + "\n" for row in texts(5))}


@pytest.mark.needs("datasets")
@pytest.mark.parametrize("form", JSON)
def test_each_form_of_a_json_file(form: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(JSON[form], encoding="utf-8")
    assert values_of(tmp_path / "a.json") == texts(5)


def table(path: Path) -> None:
    """300 rows as the package datasets writes them."""
    import datasets

    made = datasets.Dataset.from_list(texts(300))
    write: Any = {".parquet": made.to_parquet, ".tsv": made.to_csv}[path.suffix]
    write(str(path), **({"sep": "\t"} if path.suffix == ".tsv" else {}))


@pytest.mark.needs("datasets")
def test_a_table_unpacks_to_a_limit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "UNPACKED", 1 << 10)
    monkeypatch.setattr(rows, "UNPACKED_TIMES", 0)
    table(tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a.parquet unpacks to more than 1 KiB\. HINT: ls -l "):
        values_of(tmp_path / "a.parquet")


@pytest.mark.needs("datasets")
@pytest.mark.parametrize("suffix", [".parquet", ".tsv"])
def test_tables_have_the_rows_of_lines(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    table(path)
    assert values_of(path) == texts(300)
    (reader,) = open_rows([path])
    assert len(reader.parts(2000)) > 2
    assert rows_in([reader], 2000) == texts(300)


def test_a_text_file_is_a_row(tmp_path: Path) -> None:
    for name in "ba":
        (tmp_path / f"{name}.txt").write_text(f"file {name}\n", encoding="utf-8")
    assert values_of(tmp_path) == [{"text": "file a\n"}, {"text": "file b\n"}]
    (tmp_path / "b.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"b.txt is not text in UTF-8 at byte 0: .* HINT: "):
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


def test_a_file_is_cut_where_lines_begin(tmp_path: Path) -> None:
    """At the first line from each multiple of the size: other cuts would be another fingerprint."""
    path = write_lines(tmp_path / "a.jsonl", [*texts(100), {"text": "long" * 2000}, *texts(100)])
    (reader,) = open_rows([path])
    starts = np.cumsum([0, *(len(line) for line in path.read_bytes().splitlines(keepends=True))])
    lines = np.unique(np.searchsorted(starts, np.arange(1000, int(starts[-1]), 1000)))
    assert [part.row for part in reader.parts(1000)] == [0, *lines[lines < 201].tolist()]
    assert rows_in([reader], 1000) == rows_in([reader])
    assert sum(part.rows for part in reader.parts(1000)) == 201


WRONG: dict[str, tuple[bytes, str]] = {
    "broken": (b'{"text": "a"}\n{"text": \n{}\n', r"line 2 is not an object of JSON: .*sed -n 2p "),
    "latin": (b'{"text": "a"}\n\n{"text": "\xe9"}\n', r"line 3 is not an object of JSON: .*sed -n 3p "),
    "a list": (b"[1]\n", r"line 1 is not an object of JSON: a list.* HINT: "),
    "deep": (b"[" * 100_000 + b"\n", r"line 1 is not .* HINT: sed -n 1p"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_line_is_named(name: str, tmp_path: Path) -> None:
    content, message = WRONG[name]
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        values_of(tmp_path / "a.jsonl")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["{}.jsonl", "data/{}-00000-of-00001.jsonl", "{}/a.txt"])
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
    samples = [part.batch(np.array([0, len(part) - 1]))["inputs"] for part in (data.train, data.heldout)]
    letters = [set(map(chr, part.unique().tolist())) - {"\0"} for part in samples]
    assert letters == [{"a"}, {"b", "c"}]
    assert "held out, as the name says" in caplog.text


# ---------------------------------------------------------------- the cache


def test_a_cache_that_cannot_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "rename", lambda *_: os.close(-1))
    with pytest.raises(ConfigError, match=r"data cannot be written .* HINT: XDG_CACHE"):
        rows.made_once("cut", ["a"], lambda aside: aside.touch())


# ---------------------------------------------------------------- hf:


@pytest.mark.needs("datasets")
def test_a_folder_of_save_to_disk(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    made = Dataset.from_list(texts(300))
    both = DatasetDict({"train": made.select(range(299, -1, -1)), "test": made.select(range(5))})
    saved = tmp_path / "saved"
    both.save_to_disk(str(saved))
    assert rows_in(Source(f"hf:{saved}", split="test").open()) == texts(5)
    assert rows_in(Source(f"hf:{saved}").open(), 1000) == texts(300)[::-1]
    assert Source(f"hf:{saved}").identity() != Source(f"hf:{saved}", split="test").identity()
    for source in (Source(f"hf:{saved}", split="dev"), Source(f"hf:{saved}/gone")):
        with pytest.raises(ConfigError, match=r"cannot be read from this machine: .* HINT: python -c "):
            source.open()
    with pytest.raises(ConfigError, match=r"config and split have no effect on .*a.jsonl\. HINT: "):
        Source(str(write_lines(tmp_path / "a.jsonl", texts(3))), split="x").open()


@pytest.mark.long
@pytest.mark.needs("datasets")
def test_a_cached_data_set_by_name(tmp_path: Path) -> None:
    """The cache as load_dataset on a machine with a network leaves it, read by a process without one."""
    folder = tmp_path / "datasets" / "org___corpus" / "small" / "0.0.0" / ("0" * 40)
    make = (
        "import datasets, sys, json; from pathlib import Path\n"
        "from datasets.arrow_writer import ArrowWriter\n"
        "rows = datasets.Dataset.from_list(json.loads(sys.argv[2])); folder = Path(sys.argv[1])\n"
        "folder.mkdir(parents=True)\n"
        "writer = ArrowWriter(path=str(folder / 'corpus-train.arrow'))\n"
        "writer.write_table(rows.data.table); writer.finalize()\n"
        "splits = datasets.SplitDict(dataset_name='corpus')\n"
        "splits.add(datasets.SplitInfo('train', 1, len(rows), dataset_name='corpus'))\n"
        "datasets.DatasetInfo(features=rows.features, builder_name='parquet', dataset_name='corpus',\n"
        "  config_name='small', splits=splits).write_to_directory(str(folder))\n"
    )
    read = (
        "import json, sys; from fsdp.tokenize.rows import Source; from tests.tokenize.rows import rows_in\n"
        "print(json.dumps(rows_in(Source(sys.argv[1], 'small').open())))"
    )
    environ = {**os.environ, "HF_HOME": str(tmp_path), "HF_DATASETS_CACHE": str(tmp_path / "datasets")}

    def run(code: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *words]
        return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)

    done = run(make, str(folder), json.dumps(texts(3)))
    assert done.returncode == 0, done.stderr
    done = run(read, "hf:org/corpus")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == texts(3)
    done = run(read, "hf:org/absent")
    assert "hf:org/absent small cannot be read from this machine: " in done.stderr
    assert "datasets.load_dataset('org/absent', 'small')" in done.stderr
