"""Rows of files by number; wrong files in one line with the file, the line and a HINT."""

from __future__ import annotations

import gzip
import json
import re
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp.base import regular_file
from fsdp.base.errors import ConfigError
from fsdp.config import DataSection
from fsdp.data import build_dataset
from fsdp.tokenize.documents import DocumentOptions, form_of
from fsdp.tokenize.locate import SourceName
from fsdp.tokenize.sources import READERS, ROWS, find_files, open_rows
from tests.support.data_cache import own_cache as own_cache
from tests.tokenize.rows import texts, write_lines


def test_each_suffix_of_rows_has_a_reader() -> None:
    plain = {name.removesuffix(".gz").removesuffix(".zst") for name in ROWS}
    assert plain == set(READERS)


def values_of(name: Path | str) -> list[dict[str, Any]]:
    return [dict(row.values) for rows in open_rows(find_files(str(name))) for row in rows.read(0, rows.count)]


def test_lines_of_json(tmp_path: Path) -> None:
    assert values_of(write_lines(tmp_path / "a.jsonl", texts(5))) == texts(5)


def test_a_last_line_without_a_newline_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')
    assert values_of(path) == [{"text": "a"}, {"text": "b"}]


def test_compressed_lines(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "a.jsonl", texts(50)).read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain[:1000]) + gzip.compress(plain[1000:]))
    assert values_of(tmp_path / "b.jsonl.gz") == texts(50)


@pytest.mark.needs("zstandard")
def test_zst(tmp_path: Path) -> None:
    import zstandard

    plain = write_lines(tmp_path / "a.jsonl", texts(50)).read_bytes()
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(plain))
    assert values_of(tmp_path / "b.jsonl.zst") == texts(50)


@pytest.mark.needs("pyarrow")
def test_parquet_by_row_groups(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", 100, group=30)
    (rows,) = open_rows([tmp_path / "a.parquet"])
    assert rows.cuts(1) == [30, 60, 90, 100]
    assert [row.values for row in rows.read(25, 65)] == texts(100)[25:65]


def parquet(path: Path, count: int, group: int = 1000) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(texts(count)), path, row_group_size=group)


def test_a_text_file_is_a_row(tmp_path: Path) -> None:
    for name in "ba":
        (tmp_path / f"{name}.txt").write_text(f"file {name}\n", encoding="utf-8")
    assert values_of(tmp_path) == [{"text": "file a\n"}, {"text": "file b\n"}]


def test_folders_and_patterns_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.jsonl", "deep/a.jsonl", ".c.jsonl"):
        write_lines(tmp_path / name, [{"text": name}])
    (tmp_path / "README.txt").write_text("of the folder", encoding="utf-8")
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
    "broken": (b'{"text": "a"}\n{"text": \n{}\n', r"line 2 is not JSON: Expecting value at .*sed -n 2p "),
    "latin": (b'{"text": "a"}\n\n{"text": "\xe9"}\n', r"line 3 is not UTF-8 at byte 10 of .*sed -n 3p "),
    "a list": (b"[1]\n", r"line 1 is a list, not an object with columns\. HINT: an object for each row"),
    "empty": (b"", r"a.jsonl is empty\. HINT: rm "),
    "deep": (b"[" * 100_000 + b"\n", r"line 1 is not JSON: .* HINT: sed -n 1p"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_line_is_named(name: str, tmp_path: Path) -> None:
    content, message = WRONG[name]
    (tmp_path / "a.jsonl").write_bytes(content)
    one_line(message, lambda: values_of(tmp_path / "a.jsonl"))


def one_line(message: str, call: Callable[[], Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        call()
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_hint_shows_the_line(tmp_path: Path) -> None:
    path = tmp_path / "some rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\nnot JSON\n'))
    error = one_line(r"rows.jsonl.gz line 2 is not JSON", lambda: values_of(path))
    command = str(error.hint).removesuffix(" shows it")
    assert subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout == "not JSON\n"


@pytest.mark.needs("zstandard", "pyarrow")
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_compressed_file_has_a_bound(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    import pyarrow.parquet
    import zstandard

    monkeypatch.setattr(regular_file, "UNPACKED", 1 << 16)
    path, plain = tmp_path / name, bytes(1 << 20)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": [plain.decode()]}), path, compression="zstd")
    else:
        path.write_bytes(gzip.compress(plain) if path.suffix == ".gz" else zstandard.compress(plain))
    one_line(f"{name} unpacks to more than .* HINT: rm ", lambda: values_of(path))


def test_a_compressed_file_that_is_cut_short(tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps(texts(1000)).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    one_line(
        r"a.jsonl.gz is damaged or cut short: .* HINT: copy it again; gzip -t", lambda: values_of(tmp_path)
    )


@pytest.mark.needs("zstandard")
@pytest.mark.parametrize("frames", [1, 5])
def test_a_zst_file_that_is_cut_short_anywhere(frames: int, tmp_path: Path) -> None:
    import zstandard

    rows = write_lines(tmp_path / "a", texts(3000)).read_bytes()
    parts = [rows[at : at + -(-len(rows) // frames)] for at in range(0, len(rows), -(-len(rows) // frames))]
    whole = b"".join(map(zstandard.compress, parts))
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(whole)
    assert values_of(path) == texts(3000)
    for size in (len(whole) - 1, len(whole) // 2, 3):
        path.write_bytes(whole[:size])
        one_line(
            r"a.jsonl.zst is damaged or cut short: .* HINT: copy it again; zstd -t", lambda: values_of(path)
        )


@pytest.mark.needs("pyarrow")
def test_text_in_parquet_that_is_no_utf_8_is_named_with_its_row(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    raw = pyarrow.array([b"good"] * 1500 + [b"ab\xe9cd"], pyarrow.binary()).view(pyarrow.string())
    write_table(pyarrow.table({"text": raw}), tmp_path / "a.parquet")
    one_line(r"a.parquet row 1501: text is not UTF-8 at byte 2: .* HINT: ", lambda: values_of(tmp_path))


@pytest.mark.needs("pyarrow")
def test_a_column_that_python_has_no_value_for_matters_where_it_is_read(tmp_path: Path) -> None:
    """Dates beyond the year 9999, and two columns of one name."""
    import pyarrow
    from pyarrow.parquet import write_table

    dates = pyarrow.array([0] * 1499 + [2**61], pyarrow.timestamp("ms"))
    texts_ = pyarrow.array([f"text {n}" for n in range(1500)])
    numbers = pyarrow.array(range(1500))
    names = ["crawled", "text", "n", "n"]
    write_table(pyarrow.Table.from_arrays([dates, texts_, numbers, numbers], names), tmp_path / "a.parquet")
    (rows,) = open_rows([tmp_path / "a.parquet"])
    assert [row.values["text"] for row in rows.read(0, 1500)] == texts_.to_pylist()
    *_, last = rows.read(1400, 1500)
    assert list(last.values) == names
    assert "crawled" in last.values
    assert "date" not in last.values
    one_line(r"a.parquet row 1500: crawled cannot be read: .* HINT: ", lambda: last.values["crawled"])
    one_line(r"a.parquet: column n cannot be read: .* HINT: ", lambda: last.values["n"])
    with pytest.raises(KeyError):
        last.values["date"]
    with pytest.raises(ConfigError, match=r"has no column words; .* HINT: --data.args.text text$"):
        form_of(last, DocumentOptions(text="words"))


@pytest.mark.needs("pyarrow")
def test_a_parquet_file_that_is_cut_short_or_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet(path, 1000)
    path.write_bytes(path.read_bytes()[:-100])
    one_line(r"a.parquet is not a whole Parquet file: .* HINT: copy it again; ls -l", lambda: values_of(path))


@pytest.mark.needs("pyarrow")
def test_a_parquet_file_that_is_damaged_within_is_named_with_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet(path, 9000, group=3000)
    from pyarrow.parquet import read_metadata

    column = read_metadata(path).row_group(1).column(1)
    first = column.dictionary_page_offset or column.data_page_offset
    content = path.read_bytes()
    path.write_bytes(content[: first + 100] + bytes(1000) + content[first + 1100 :])
    one_line(r"a.parquet, rows 3001 to 6000 is not a whole Parquet file: .* HINT: ", lambda: values_of(path))


OTHER_KINDS = {
    ".jsonl.gz": gzip.compress,
    ".parquet": lambda rows: b"PAR1\xff" + rows,
    ".jsonl.zst": lambda rows: b"\x28\xb5\x2f\xfd\xff" + rows,
}


@pytest.mark.parametrize("suffix", OTHER_KINDS)
def test_the_hint_for_a_file_of_another_kind_renames_it(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "some rows.jsonl"
    path.write_bytes(OTHER_KINDS[suffix](b'{"text": "a"}\n'))
    error = one_line(r"some rows.jsonl line 1 is not UTF-8 at byte", lambda: values_of(path))
    subprocess.run(["sh", "-c", str(error.hint).partition(": ")[2]], check=True)
    assert (tmp_path / f"some rows{suffix}").is_file()


def test_a_link_to_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", texts(3))
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone.jsonl")
    one_line(
        r"b.jsonl is a link to .*gone.jsonl, which does not exist\. HINT: rm ", lambda: values_of(tmp_path)
    )


def test_text_that_is_no_utf_8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xe9cd")
    one_line(r"a.txt is not UTF-8 at byte 2: .* HINT: iconv ", lambda: values_of(tmp_path))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
@pytest.mark.parametrize(
    "text", ["Once upon a time, ünder the sea.\n" * 9, "Жил-был у бабушки козлик.\n" * 9]
)
def test_text_of_another_encoding_is_named_and_the_hint_converts_it(
    text: str, encoding: str, tmp_path: Path
) -> None:
    path = tmp_path / "a b.txt"
    path.write_text(text, encoding=encoding)
    error = one_line(
        rf"a b.txt is not UTF-8: byte \d+ .* looks like {encoding[:6].upper()}", lambda: values_of(path)
    )
    subprocess.run(["sh", "-c", str(error.hint)], check=True)
    assert [row["text"].removeprefix("\ufeff") for row in values_of(path)] == [text]


@pytest.mark.parametrize(
    "content", [b"\x7fELF\0\0\0\1" * 100, b"ab\0", b"a long line of text " * 9 + b"\0 more"]
)
def test_a_zero_byte_in_a_text_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    at = content.index(0)
    one_line(rf"a.txt is not text: byte {at} is zero\. HINT: another file; ", lambda: values_of(tmp_path))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_the_hint_for_rows_of_utf_16_converts_them(name: str, encoding: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text('{"text": "ü"}\n{"text": "b"}\n', encoding=encoding)
    error = one_line(rf"{name} .*HINT: iconv -f utf-16", lambda: values_of(path))
    subprocess.run(["sh", "-c", str(error.hint)], check=True)
    assert [row["text"] for row in values_of(tmp_path)] == ["ü", "b"]


def test_a_name_without_files(tmp_path: Path) -> None:
    one_line(r"/\*\.jsonl matches no file. HINT: ls /", lambda: values_of(tmp_path / "*.jsonl"))
    (tmp_path / "a.csv").write_text("a,b", encoding="utf-8")
    one_line(r"a.csv is not a .jsonl, ", lambda: values_of(tmp_path / "a.csv"))


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.jsonl does not exist. HINT: "):
        find_files(str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match=rf"matches no file. HINT: ls {tmp_path}$"):
        find_files(str(tmp_path / "*" / "none.jsonl"))


@pytest.mark.parametrize("form", ["{}.jsonl", "data/{}-00000-of-00001.jsonl", "{}/part.jsonl", "{}/a.txt"])
@pytest.mark.parametrize("pattern", ["", "/**/*.*"])
def test_files_of_other_splits_are_held_out(
    form: str, pattern: str, tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder with train.jsonl and test.jsonl trained on both."""
    for split, letter in (("test", "a"), ("train", "b"), ("validation", "c")):
        path = tmp_path / form.format(split)
        path.parent.mkdir(parents=True, exist_ok=True)
        if form.endswith(".txt"):
            path.write_text(letter * 200, encoding="utf-8")
        else:
            write_lines(path, [{"text": letter * 50}] * 4)
    for _ in range(2):  # tokenized, and from the cache
        caplog.clear()
        with caplog.at_level("INFO"):
            found = build_dataset(DataSection(name=f"{tmp_path}{pattern}", tokenizer="bytes", seq_len=8))
        assert "and 1 more: held out, as the name says" in caplog.text
        for rows, letters in ((found.train, "b"), (found.heldout, "ac")):
            assert rows is not None
            seen = rows.batch(np.arange(len(rows)))["inputs"].unique().tolist()
            assert {chr(token) for token in seen} & set("abc") == set(letters)


def test_names_of_other_words_are_no_splits(tmp_path: Path) -> None:
    for name in ("training-notes", "testimony", "valley", "evaluate"):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": name}])
    assert not SourceName(str(tmp_path)).held_out()
