"""Indexes of many files: the same samples as without one, built once, rebuilt when the files change."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.data_start import document_shards, starts
from fsdp.base.errors import ConfigError
from fsdp.config import DataSection
from fsdp.data import DataSet, build_dataset, documents, folder, tokens
from fsdp.tokenize.shard_plan import TokenizeJob
from fsdp.tokenize.shards import tokenize
from tests.data.test_folder import make_two_classes, paint
from tests.data.test_text_tokens import rows_of
from tests.support.data_cache import own_cache as own_cache
from tests.tokenize.rows import texts, write_lines


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index from the third file on."""
    for module in (tokens, documents):
        monkeypatch.setattr(module, "MANY", 2)
    monkeypatch.setattr(folder, "MANY", 2)
    monkeypatch.setattr(documents, "COUNTED_ONCE", 2)


def of(path: Path, **args: Any) -> DataSet:
    return build_dataset(DataSection(name=str(path), seq_len=8, args=args))


def assert_same(ours: DataSet, theirs: DataSet) -> None:
    assert ours.info == theirs.info
    assert ours.heldout is not None
    assert theirs.heldout is not None
    for one, other in ((ours.train, theirs.train), (ours.heldout, theirs.heldout)):
        for left, right in zip(rows_of(one), rows_of(other), strict=True):
            assert np.array_equal(left, right)


def token_files(root: Path, count: int = 5) -> Path:
    root.mkdir()
    for n in range(count):
        np.arange(n, n + 40 + n, dtype=np.uint16).tofile(root / f"a{n}.bin")
    np.save(root / "b.npy", np.arange(30, dtype=np.int64))
    np.arange(50, dtype=np.uint16).tofile(root / "val.bin")
    return root


def test_token_files_by_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = token_files(tmp_path / "tokens")
    without = of(root, vocab_size=200)
    monkeypatch.setattr(tokens, "MANY", 2)
    assert_same(of(root, vocab_size=200), without)
    monkeypatch.setattr(tokens, "_examined", None)
    assert_same(of(root, vocab_size=200), without)


@pytest.mark.usefixtures("small_limits")
def test_changed_token_files_are_examined_again(tmp_path: Path) -> None:
    root = token_files(tmp_path / "tokens")
    before = len(of(root, vocab_size=200).train)
    np.arange(80, dtype=np.uint16).tofile(root / "c.bin")
    assert len(of(root, vocab_size=200).train) == before + 10
    (root / "tokens.json").write_text('{"dtype": "uint16", "vocab_size": 100}', encoding="utf-8")
    assert of(root).info.facts["vocab_size"] == 100
    np.array([7, 500], np.uint16).tofile(root / "c.bin")
    with pytest.raises(ConfigError, match=r"c.bin: the token at position 1 is 500, beyond "):
        of(root, vocab_size=200)


@pytest.mark.parametrize("form", ["text", "pairs"])
def test_documents_by_an_index(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = texts(300)
    if form == "pairs":
        rows = [{"prompt": row["text"][:5], "completion": row["text"][5:]} for row in rows]
    path, out = write_lines(tmp_path / "a.jsonl", rows), tmp_path / "out"
    job = TokenizeJob(str(path), heldout=0.1, shard_bytes=2000)
    tokenize(job, out, 1, lambda *_: None)
    without = [of(out), of(out, rows="document"), of(out, rows="packed")]
    for name, value in (("MANY", 2), ("COUNTED_ONCE", 2)):
        monkeypatch.setattr(documents, name, value)
    for before, args in zip(without, ({}, {"rows": "document"}, {"rows": "packed"}), strict=True):
        assert_same(of(out, **args), before)


def test_images_by_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_two_classes(tmp_path / "flat", 12)
    make_two_classes(tmp_path / "two" / "train", 4)
    make_two_classes(tmp_path / "two" / "val", 2)
    paint(tmp_path / "flat" / "red" / "deep" / "x.png", (9, 9, 9))
    args = {"image_size": 4}
    without = [of(tmp_path / name, **args) for name in ("flat", "two")]
    monkeypatch.setattr(folder, "MANY", 2)
    for name, before in zip(("flat", "two"), without, strict=True):
        assert_same(of(tmp_path / name, **args), before)
    monkeypatch.setattr(folder, "_find", None)
    assert_same(of(tmp_path / "flat", **args), without[0])


@pytest.mark.usefixtures("small_limits")
def test_an_added_image_is_found_also_deep_down(tmp_path: Path) -> None:
    make_two_classes(tmp_path, 6)
    paint(tmp_path / "red" / "deep" / "x.png", (9, 9, 9))
    (tmp_path / "red" / "void").mkdir()
    sizes = [count(tmp_path)]
    for place in ("red/y.png", "red/deep/z.png", "blue/new/a.png", "blue/new/b.png", "red/void/c.png"):
        paint(tmp_path / place, (8, 8, 8))
        sizes.append(count(tmp_path))
    assert sizes == [13, 14, 15, 16, 17, 18]


def count(root: Path) -> int:
    made = of(root, image_size=4)
    assert made.heldout is not None
    return len(made.train) + len(made.heldout)


def test_a_start_allocates_no_more_for_a_hundred_million_documents(tmp_path: Path) -> None:
    peaks = {}
    for count in (10**3, 10**8):
        document_shards(tmp_path / str(count), count)
        of(tmp_path / str(count), rows="document")  # the first start makes the index
        tracemalloc.start()
        made = of(tmp_path / str(count), rows="document")
        made.train.batch(np.array([0, count // 2, count - 1]))
        peaks[count] = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        assert len(made.train) == count
    assert peaks[10**8] < peaks[10**3] + 2, peaks  # MiB: the names of a thousand shards


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "small", "large"),
    [
        ("pictures", 30_000, 3_000_000),
        ("documents", 10**3, 10**9),
        ("tokens", 10**6, 10**12),
        ("packed", 3 * 10**6, 10**7),
    ],
)
def test_memory_does_not_grow_with_the_data(form: str, small: int, large: int, tmp_path: Path) -> None:
    few, many = starts(tmp_path, form, (small, large)).values()
    assert many["second"]["samples"] > 2 * few["second"]["samples"]
    # A machine's first start writes the index, piece by piece, and keeps 22 MiB at 3e6 pictures.
    for which, more in (("first", 40), ("second", 4)):
        assert many[which]["heap_mib"] < few[which]["heap_mib"] + more, (few, many)
