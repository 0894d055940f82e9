"""Text and token files: every window once, targets one on, held-out text apart."""

from __future__ import annotations

import hashlib
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp.base.errors import ConfigError, TrainingError
from fsdp.config import DataSection
from fsdp.data import DataSet, build_dataset
from fsdp.data.tokens import TokenFile, TokenRow
from tests.support.data_cache import own_cache as own_cache


def text(**fields: Any) -> DataSet:
    return build_dataset(DataSection(name="text", **fields))


def tokens(folder: Path, seq_len: int = 8, **args: Any) -> DataSet:
    return build_dataset(
        DataSection(name="tokens", dir=str(folder), seq_len=seq_len, args={"vocab_size": 1000, **args})
    )


def rows_of(samples: Any) -> tuple[np.ndarray, np.ndarray]:
    batch = samples.batch(np.arange(len(samples)))
    return batch["inputs"].numpy(), batch["targets"].numpy()


# ---------------------------------------------------------------- text


def test_every_byte_of_a_split_is_an_input_once(tmp_path: Path) -> None:
    for n in range(10):
        (tmp_path / f"{n}.py").write_bytes(bytes([65 + n]) * 101)
    data = text(dir=str(tmp_path), seq_len=10)
    assert data.heldout is not None
    assert (
        "".join(map(chr, rows_of(data.train)[0].reshape(-1)))
        == "".join(chr(65 + n) * 101 for n in range(9))[:900]
    )
    assert set(rows_of(data.heldout)[0].reshape(-1)) == {65 + 9}


def whole(data: DataSet) -> bytes:
    """The text of train and held-out samples of length 1, in this order: every input, and the last target."""
    assert data.heldout is not None
    rows = (rows_of(part) for part in (data.train, data.heldout))
    return b"".join(bytes([*inputs.reshape(-1).tolist(), int(targets[-1, -1])]) for inputs, targets in rows)


PROSE = "Ünïcödé — 日本語, Ελληνικά, עברית 🙂. " * 40


def test_any_text_file_is_read_in_unicode_and_empty_ones_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(PROSE, encoding="utf-8")
    (tmp_path / "b.md").touch()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "c").write_text(PROSE, encoding="utf-8")
    (tmp_path / ".hidden").write_text("no", encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0" * 100)
    assert whole(text(dir=str(tmp_path), seq_len=1)) == 2 * PROSE.encode()


@pytest.mark.parametrize("wrong", ["é".encode("latin-1"), "é".encode("utf-16-le"), b"\0"])
def test_bytes_that_are_no_utf_8_are_named(wrong: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 9000 + wrong + b"y" * 700)
    with pytest.raises(ConfigError, match=r"a.txt is not text in UTF-8 at byte 900\d.* HINT: iconv .*a.txt"):
        text(dir=str(tmp_path))


def test_a_folder_of_sources_gives_what_it_gave(tmp_path: Path) -> None:
    """Bytes of any encoding, tests left out: the samples of runs that began when sources were all that was
    read.
    """
    for n in range(10):
        (tmp_path / f"{n}.py").write_bytes(bytes([0xE0 + n]) * 300)
    (tmp_path / "notes.txt").write_text("x" * 300, encoding="utf-8")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text("y" * 300, encoding="utf-8")
    (tmp_path / ".#3.py").symlink_to("me@here.1234")  # as Emacs locks a file that it edits
    data = text(dir=str(tmp_path), args={"files": "*.py"})
    assert (
        data.info.facts["fingerprint"]
        == hashlib.sha256(b"".join(bytes([0xE0 + n]) * 300 for n in range(10))).hexdigest()[:16]
    )


# ---------------------------------------------------------------- tokens


def test_many_files_are_one_row(tmp_path: Path) -> None:
    row = np.arange(1, 1000, dtype=np.uint16)
    for place, part in enumerate(np.split(row, [3, 4, 400, 700])):
        (tmp_path / f"part{place}.bin").write_bytes(part.tobytes())
    data = tokens(tmp_path, heldout=0.1)
    assert data.heldout is not None
    inputs = np.concatenate([rows_of(part)[0] for part in (data.train, data.heldout)])
    targets = np.concatenate([rows_of(part)[1] for part in (data.train, data.heldout)])
    assert np.array_equal(inputs.reshape(-1), row[: inputs.size])
    assert np.array_equal(targets.reshape(-1), row[1 : inputs.size + 1])
    assert (len(data.train), len(data.heldout)) == (111, 13)


def test_token_files_of_other_splits_are_held_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("val", "test1", "test2", "dev"):
        np.arange(100, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    assert len(tokens(tmp_path).train) == 37, "nothing else is there to train on"
    for name in ("train", "testimony"):
        np.arange(100, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    with caplog.at_level("INFO"):
        found = tokens(tmp_path)
    assert len(found.train) == 24
    assert found.heldout is not None
    assert len(found.heldout) == 49
    assert "dev.bin and 3 more: held out" in caplog.text


def test_a_token_beyond_the_vocabulary_is_named_before_the_run_and_deep_inside_when_read(
    tmp_path: Path,
) -> None:
    row = np.zeros(300_000, dtype=np.uint16)
    row[150_000] = 1500
    row.tofile(tmp_path / "a.bin")
    data = tokens(tmp_path)
    beyond = "is 1500 as uint16, beyond a vocabulary of 1000"
    with pytest.raises(TrainingError, match=rf"a.bin: the token at position 150000 {beyond}"):
        data.train.batch(np.array([150_000 // 8]))
    row[3] = 1500
    row.tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=rf"position 3 {beyond}.* HINT: --data.args.vocab_size 1501"):
        tokens(tmp_path)


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_file_that_changes_during_the_run_is_one_line(how: str, tmp_path: Path) -> None:
    """Not SIGBUS, which ends a process that maps a file that has become shorter."""
    np.arange(4000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    data = tokens(tmp_path, vocab_size=4000)
    if how == "cut":
        data.train.batch(np.array([0]))
        with (tmp_path / "a.bin").open("r+b") as file:
            file.truncate(3001)
        assert data.train.batch(np.array([186]))["targets"][0, -1] == 1496
        message = (
            r"a.bin ends at token 1500; it had 4000 tokens at the start\. HINT: copy it again and .* ls -l /"
        )
    else:
        (tmp_path / "a.bin").unlink()
        message = (
            r"a.bin cannot be read \(No such file .* it had 4000 tokens at the start\. HINT: copy it again"
        )
    with pytest.raises(TrainingError, match=message) as caught:
        data.train.batch(np.array([3, 187]))
    assert "\n" not in str(caught.value)


def test_files_that_are_not_tokens_are_named(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"123")
    with pytest.raises(
        ConfigError, match=r"odd.bin has 3 bytes, not those of .* uint16\. HINT: copy it again"
    ):
        tokens(tmp_path)
    (tmp_path / "odd.bin").unlink()
    np.save(tmp_path / "float.npy", np.zeros(100))
    with pytest.raises(
        ConfigError, match=r"float.npy is not a file of tokens: float64 \[100\] is not one row"
    ):
        tokens(tmp_path)


# ---------------------------------------------------------------- how wide a raw file's tokens are


def numbers(count: int = 5000, below: int = 1000) -> np.ndarray:
    return np.random.default_rng(0).integers(0, below, count)


def inputs_of(data: DataSet) -> np.ndarray:
    return rows_of(data.train)[0].reshape(-1)


@pytest.mark.parametrize("sidecar", ["a.bin.json", "tokens.json"])
def test_a_sidecar_says_the_width_and_the_vocabulary(tmp_path: Path, sidecar: str) -> None:
    row = numbers()
    row.astype(np.int64).tofile(tmp_path / "a.bin")
    (tmp_path / sidecar).write_text('{"dtype": "int64", "vocab_size": 1234, "tokenizer": "mine"}')
    data = build_dataset(DataSection(name="tokens", dir=str(tmp_path), seq_len=8))
    assert data.info.facts["vocab_size"] == 1234
    assert np.array_equal(inputs_of(data), row[: len(data.train) * 8])
    with pytest.raises(
        ConfigError, match=rf"{sidecar} gives int64, but --data.args.dtype is uint16. HINT: leave"
    ):
        tokens(tmp_path, dtype="uint16")


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "uint16"), (20240801, 7, "uint32")])
def test_llm_cs_header_is_read_and_is_no_token(tmp_path: Path, magic: int, version: int, dtype: str) -> None:
    row = numbers()
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(row)
    (tmp_path / "a.bin").write_bytes(header.tobytes() + row.astype(dtype).tobytes())
    data = tokens(tmp_path)
    assert np.array_equal(inputs_of(data), row[: len(data.train) * 8])
    header[2] -= 1
    (tmp_path / "a.bin").write_bytes(header.tobytes() + row.astype(dtype).tobytes())
    with pytest.raises(ConfigError, match=r"a.bin has \d+ bytes, not those of 4999 tokens"):
        tokens(tmp_path)


@pytest.mark.parametrize(("code", "dtype"), [(8, "uint16"), (5, "int64")])
def test_megatrons_index_says_the_width(tmp_path: Path, code: int, dtype: str) -> None:
    row = numbers()
    row.astype(dtype).tofile(tmp_path / "a.bin")
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, 1, 2) + struct.pack("<iqqq", len(row), 0, 0, 1)
    (tmp_path / "a.idx").write_bytes(index)
    data = tokens(tmp_path)
    assert np.array_equal(inputs_of(data), row[: len(data.train) * 8])


def test_threads_that_open_and_close_files_for_each_other_read_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor that another thread closes may be another file's by the read."""
    monkeypatch.setattr("fsdp.data.tokens.OPEN_AT_ONCE", 1)
    for number in range(9):
        (tmp_path / f"{number}.bin").write_bytes(bytes([number, 0] * 50))
    row = TokenRow([TokenFile(file, np.dtype("<u2"), 0, 50) for file in sorted(tmp_path.iterdir())], 9)
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda n: int(row._read(n % 9, 0, 1)[0]) - n % 9, range(9000))] == [0] * 9000
