"""Odd files, names, links and permissions as --data.name: a good run, or one line with a HINT."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from fsdp.base.errors import ConfigError
from fsdp.config import DataSection
from fsdp.data import build_dataset
from tests.support.data_cache import own_cache as own_cache
from tests.tokenize.rows import texts, write_lines

LIST = json.dumps(texts(20)).encode()


def samples(name: Path | str) -> int:
    return len(build_dataset(DataSection(name=str(name), seq_len=8)).train)


def put(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".", 1)).write_bytes(content)
    return folder


def written(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def link_to_nothing(folder: Path) -> Path:
    (folder / "a.jsonl").symlink_to(folder / "gone.jsonl")
    return folder


def row(**values: object) -> Callable[[Path], Path]:
    return written("a.jsonl", json.dumps(values).encode())


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a link to nothing": (link_to_nothing, "a.jsonl cannot be read .No such file.*HINT: ls -ld "),
    "a list in .gz": (written("a.json.gz", LIST), r"is damaged: .* HINT: gzip -t"),
    "a store": (lambda folder: Path("s3://bucket/prefix"), "data are read from a disk.* HINT: aws s3 cp"),
    "binary files": (lambda folder: put(folder, a_dat=b"\0\1"), "no text file; 1 are binary"),
    "a picture": (
        written("a", b"\x89PNG\r\n\x1a\n\0\0"),
        "a is not text in UTF-8 at byte 8: .* HINT: iconv ",
    ),
    "instructions": (
        row(instruction="Say a.", output="It is the letter a."),
        "has no column text; its columns are instruction, output. HINT: .* --data.args.text output",
    ),
    "a long name": (lambda folder: Path("x" * 5000), "cannot be read .File name too long.. HINT: ls -ld x"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as caught:
        samples(str(make(tmp_path)).replace("s3:/", "s3://"))
    assert "\n" not in str(caught.value)


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
