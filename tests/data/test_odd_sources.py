"""Odd files, names, links and permissions as --data.name: a good run, or one line with a HINT."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from fsdp.base.errors import ConfigError
from fsdp.config import DataSection
from fsdp.data import build_dataset
from tests.support.data_cache import own_cache as own_cache
from tests.support.marks import quick_are
from tests.tokenize.rows import texts, write_lines

LIST = json.dumps(texts(20)).encode()
LINES = "".join(json.dumps(row) + "\n" for row in texts(20)).encode()


def samples(name: Path | str) -> int:
    return len(build_dataset(DataSection(name=str(name), seq_len=8)).train)


def put(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".", 1)).write_bytes(content)
    return folder


def a_link_to_itself(folder: Path) -> Path:
    put(folder, a_jsonl=LINES, README_md=b"About the rows.")
    (folder / "self").symlink_to(folder)
    return folder


def rows_in_subfolders(folder: Path) -> Path:
    put(folder / "2024", a_json=LIST)
    return folder


def written(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


READ: dict[str, Callable[[Path], Path]] = {
    "a folder with a link to itself": a_link_to_itself,
    "rows in subfolders": rows_in_subfolders,
    "settings beside rows": lambda folder: put(folder, a_json=LIST, config_json=b"{}", LICENSE_=b"None."),
    "spaces": written("a b  c.json", LIST),
    "a line break": written("a\nb.jsonl", LINES),
    "unicode": written("日本 é.json", LIST),
    "bytes that are no text": written(os.fsdecode(b"a\xff.jsonl"), LINES),
    "brackets": written("a[1]*.json", LIST),
    "upper case": written("A.JSON", LIST),
    "ndjson": written("a.ndjson", LINES),
    "a byte order mark": written("a.json", b"\xef\xbb\xbf" + LIST),
    "carriage returns": written("a.jsonl", LINES.replace(b"\n", b"\r\n")),
    "compressed": written("a.json.gz", gzip.compress(LIST)),
}


SAMPLE = ["a folder with a link to itself", "rows in subfolders", "upper case"]


@pytest.mark.parametrize("name", quick_are(SAMPLE, READ, []))
def test_rows_are_read(name: str, tmp_path: Path) -> None:
    plain = samples(written("plain.jsonl", LINES)(put(tmp_path / "plain")))
    assert samples(READ[name](put(tmp_path / "odd"))) == plain


def looped(folder: Path) -> Path:
    (folder / "a.jsonl").symlink_to(folder / "b.jsonl")
    (folder / "b.jsonl").symlink_to(folder / "a.jsonl")
    return folder / "a.jsonl"


def links_below(pattern: str) -> Callable[[Path], Path]:
    """A pattern over two folders, of which one has its file as a link to nothing."""

    def make(folder: Path) -> Path:
        put(folder / "good", a_jsonl=LINES)
        (folder / "gone").mkdir()
        (folder / "gone/a.jsonl").symlink_to(folder / "absent.jsonl")
        return folder / pattern

    return make


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "a.json")
    return folder / "a.json"


def mixed(folder: Path) -> Path:
    put(folder, a_json=LIST, b_jsonl=LINES, c_png=b"\x89PNG")
    return folder / "*"


def archive(folder: Path) -> Path:
    """As WebDataset's shards."""
    with tarfile.open(folder / "shard-000.tar", "w") as file:
        for name in ("000.txt", "000.cls"):
            (folder / name).write_text("3")
            file.add(folder / name, name)
            (folder / name).unlink()
    return folder / "shard-000.tar"


def zipped(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "a.zip", "w") as file:
        file.writestr("a.txt", "words")
    return folder / "a.zip"


def row(**values: object) -> Callable[[Path], Path]:
    return written("a.jsonl", json.dumps(values).encode())


TURNS = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
UNPACKED = "HINT: mkdir -p .*/shard-000 && tar -xf .*/shard-000.tar -C .*-000; --data.name .*-000, or"
NULLS = json.dumps([{"text": None, "id": 1}] * 9).encode()
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "links to each other": (looped, "a.jsonl is a link to .*b.jsonl, which does not exist. HINT: rm "),
    "a link of a pattern": (links_below("*/*.jsonl"), "gone/a.jsonl is a link to .*absent.jsonl, which does"),
    "of a plain name": (links_below("*/a.jsonl"), "gone/a.jsonl is a link to .*absent.jsonl, which does"),
    "of all below": (links_below("**/*.jsonl"), "gone/a.jsonl is a link to .*absent.jsonl, which does"),
    "a pipe": (pipe, "a.json is neither a file nor a folder. HINT: cat .*a.json > rows.json makes one"),
    "no match": (lambda folder: folder / "*.json", r"\*.json matches no file. HINT: ls "),
    "a mixture": (mixed, "c.png is not a .jsonl, .json .* file. HINT: "),
    "a column of nulls": (written("a.json", NULLS), "a.json element 1: text is null, not text. HINT: "),
    "a null": (written("a.json", b'[{"text": "a"}, null]'), "element 2 is null, not an object with col"),
    "a list in .gz": (written("a.json.gz", LIST), r"is not compressed: .* HINT: mv .*a.json.gz .*a.json, "),
    "text in .gz": (written("a.gz", gzip.compress(LINES)), "a.gz is compressed. HINT: zcat .*a.gz > .*a; "),
    "bzip2": (written("a.txt.bz2", bz2.compress(LINES)), "is compressed. HINT: bzcat .*bz2 > .*/a.txt; --d"),
    "xz": (written("a.xz", lzma.compress(LINES)), "is compressed. HINT: xzcat .*/a.xz > .*/a; --data.name "),
    "a tar": (archive, f"shard-000.tar is a tar archive. {UNPACKED}"),
    "tars": (lambda folder: archive(folder).parent, f"has no text file; .* is a tar archive. {UNPACKED}"),
    "a zip": (zipped, "a.zip is a zip archive. HINT: unzip .*/a.zip -d .*/a; --data.name .*/a, or a Dataset"),
    "binary files": (lambda folder: put(folder, a_dat=b"\0\1"), "no text file; .*a.dat is binary. HINT: ls"),
    "a picture": (
        written("a", b"\x89PNG\r\n\x1a\n\0\0"),
        "a is a picture. HINT: --data.name FOLDER, with FOLDER/CLASS/a",
    ),
    "save_to_disk": (
        lambda folder: put(folder, a_arrow=b"\xff\0", state_json=b"{}"),
        "is a folder of save_to_disk. HINT: --data.name hf:/",
    ),
    "preferences": (
        row(prompt="a", chosen="b", rejected="c"),
        "line 1 has chosen and rejected: no loss of shardrun compares two answers. HINT: the chosen one",
    ),
    "conversations of another form": (
        row(id="identity_0", conversations=TURNS),
        "has no column text; its columns are id, conversations. HINT: messages are ",
    ),
    "instructions": (
        row(instruction="Say a.", output="It is the letter a."),
        "has no column text; .* HINT: --data.args.text output; or columns prompt and completion, of which",
    ),
    "authors": (
        row(title="a", abstract="b c d", authors=[{"name": "e"}]),
        "has no column text; .* HINT: --data.args.text abstract; or columns prompt and completion",
    ),
    "a line break": (
        written("a\nb.json", b"[1"),
        r"a\\nb.json is cut short: .* tail -c 80 \$'.*a\\x0ab.json' shows",
    ),
    "a long name": (lambda folder: Path("x" * 5000), "cannot be read .File name too long.. HINT: ls -ld x"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as caught:
        samples(make(tmp_path))
    assert "\n" not in str(caught.value)


CLOSED = """
import os, sys
from pathlib import Path
from fsdp.base.errors import ConfigError
from tests.data.test_odd_sources import LINES, LIST, put, samples

root = Path(sys.argv[1])
put(root / "above", a_jsonl=LINES)
put(root / "above/closed", b_jsonl=LINES)
put(root / "above/text", c_txt=b"a" * 100, d_jsonl=LINES)
put(root, a_jsonl=LINES, b_json=LIST)
closed = ("above/closed", "a.jsonl", "b.json")
for name in closed:
    os.chmod(root / name, 0)
below = ("above/closed", "above/closed/b.jsonl", "above/closed/*.jsonl", "above/**/*.jsonl",
         "above/*/*.jsonl", "above/*/*.txt", "ab*/[a-t]*/[a-d].jsonl")
for name in ("above", *below, "a.jsonl", "b.json"):
    try:
        print(samples(root / name))
    except ConfigError as error:
        print(error)
for name in closed:
    os.chmod(root / name, 0o755)
"""


@pytest.mark.long
@pytest.mark.slow
def test_what_may_not_be_read_is_named(tmp_path: Path) -> None:
    """Root reads everything: its process gives up that right."""
    drop = "-dac_override,-dac_read_search"
    user = ["setpriv", f"--inh-caps={drop}", f"--bounding-set={drop}"] if not os.geteuid() else []
    done = subprocess.run(
        [*user, sys.executable, "-c", CLOSED, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 10, done.stderr
    named = [*["above/closed"] * 8, "a.jsonl", "b.json"]
    for line, name in zip(lines, named, strict=True):
        assert line.startswith(f"{tmp_path / name}")
        assert " cannot be read (Permission denied). HINT: ls -ld " in line


@pytest.mark.parametrize("pattern", ["*.jsonl", "./*.jsonl", "abo*/*.jsonl", "abo*/a.jsonl", "../*/a.jsonl"])
def test_a_pattern_may_begin_in_the_working_folder(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "here", a_jsonl=LINES)
    put(tmp_path / "here" / "above", a_jsonl=LINES)
    monkeypatch.chdir(tmp_path / "here")
    assert samples(pattern)
    for folder in ("here", "here/above"):
        (tmp_path / folder / "b.jsonl").symlink_to("gone")
    if pattern.endswith("*.jsonl"):
        with pytest.raises(ConfigError, match=r"b\.jsonl is a link to gone, which does not exist"):
            samples(pattern)


def test_the_output_of_spark_in_one_part_is_rows(tmp_path: Path) -> None:
    write_lines(tmp_path / "part-00000.json", texts(30))
    (tmp_path / "_SUCCESS").touch()
    assert build_dataset(DataSection(name=str(tmp_path), seq_len=8)).info.preprocess["end"] == 0


def pictures(folder: Path, **others: bytes) -> Path:
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for n in range(3):
            Image.new("L", (4, 4), 40 * n).save(folder / label / f"{n}.png")
    return put(folder, **others)


@pytest.mark.parametrize("name", ["labels_json", "metadata_jsonl"])
def test_pictures_by_class_with_rows_about_them_are_pictures(name: str, tmp_path: Path) -> None:
    root = pictures(tmp_path, **{name: b'{"file_name": "cat/0.png"}'})
    assert build_dataset(DataSection(name=str(root))).info.class_names == ("cat", "dog")


def test_rows_with_a_folder_of_pictures_are_rows(tmp_path: Path) -> None:
    pictures(tmp_path / "images")
    write_lines(tmp_path / "captions.jsonl", texts(20))
    assert build_dataset(DataSection(name=str(tmp_path), seq_len=8)).info.kind == "text"


def test_rows_that_are_read_as_text_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_lines(tmp_path / "a.jsonl", texts(30))
    (tmp_path / "a.jsonl.sha256").write_text("0" * 64, encoding="utf-8")
    build_dataset(DataSection(name=str(tmp_path), seq_len=8))
    assert re.search(
        r"1 of 2 files hold rows, as .*a\.jsonl, and are read as text\. HINT: --data", caplog.text
    )
    caplog.clear()
    build_dataset(DataSection(name="text", dir=str(tmp_path), seq_len=8, args={"files": "*.jsonl"}))
    assert not caplog.records


def test_the_hint_for_an_arrow_file_makes_it_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"text": [f"once upon a time {n}" for n in range(30)]})
    with arrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    with pytest.raises(ConfigError, match=r"is an Arrow file\.") as caught:
        build_dataset(DataSection(name=str(tmp_path / "a.arrow"), seq_len=8))
    command, _, flag = str(caught.value.hint).rpartition("; ")
    subprocess.run([sys.executable, *shlex.split(command)[1:]], check=True)
    name = shlex.split(flag)[1]
    assert name.endswith("a.parquet")
    assert len(build_dataset(DataSection(name=name, seq_len=8)).train) > 50
