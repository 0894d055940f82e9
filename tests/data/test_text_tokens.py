"""Text and token files: every window once, targets one on, held-out text apart."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdp.config import DataSection
from fsdp.data import DataSet, build_dataset
from fsdp.errors import ConfigError, TrainingError


def text(**fields: Any) -> DataSet:
    return build_dataset(DataSection(name="text", **fields))


def tokens(folder: Path, seq_len: int = 8, **args: Any) -> DataSet:
    return build_dataset(DataSection(name="tokens", dir=str(folder), seq_len=seq_len, args={"vocab_size": 1000, **args}))


def rows_of(samples: Any) -> tuple[np.ndarray, np.ndarray]:
    batch = samples.batch(np.arange(len(samples)))
    return batch["inputs"].numpy(), batch["targets"].numpy()


# ---------------------------------------------------------------- text


def test_targets_are_the_inputs_one_on() -> None:
    batch = text(seq_len=64).train.batch(np.array([0, 5, 999]))
    assert batch["inputs"].shape == batch["targets"].shape == (3, 64)
    assert batch["inputs"].dtype == torch.int64
    assert torch.equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])


def test_it_is_pythons_own_sources() -> None:
    first = bytes(text(seq_len=200).train.batch(np.array([0]))["inputs"][0].tolist())
    library = Path(sysconfig.get_paths()["stdlib"])
    assert first == min(library.glob("*.py")).read_bytes()[:200]


def test_every_byte_of_a_split_is_an_input_once(tmp_path: Path) -> None:
    for n in range(10):
        (tmp_path / f"{n}.py").write_bytes(bytes([65 + n]) * 101)
    data = text(dir=str(tmp_path), seq_len=10)
    assert data.heldout is not None
    assert "".join(map(chr, rows_of(data.train)[0].reshape(-1))) == "".join(chr(65 + n) * 101 for n in range(9))[:900]
    assert set(rows_of(data.heldout)[0].reshape(-1)) == {65 + 9}


def test_the_fingerprint_tells_other_sources_apart(tmp_path: Path) -> None:
    whole, again, part = text(), text(), text(args={"max_mb": 1})
    assert whole.info.facts["fingerprint"] == again.info.facts["fingerprint"] != part.info.facts["fingerprint"]
    assert {**whole.info.facts, "fingerprint": ""} == {"vocab_size": 256, "seq_len": 256, "fingerprint": ""}
    assert whole.info.tokens_per_sample == 256
    assert whole.info.preprocess["tokenizer"] == "bytes"


def test_text_is_bounded() -> None:
    data = text(seq_len=100, args={"max_mb": 0.5})
    assert data.heldout is not None
    assert (len(data.train) + len(data.heldout)) * 100 <= 500_000


def test_too_little_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 0 bytes to train on, no sample of --data.seq_len 256.*HINT: .*--data.dir"):
        text(dir=str(tmp_path))


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


def test_val_files_are_held_out(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "train0.bin")
    np.full(33, 7, dtype=np.uint16).tofile(tmp_path / "val0.bin")
    data = tokens(tmp_path)
    assert data.heldout is not None
    assert (len(data.train), len(data.heldout)) == (12, 4)
    assert set(rows_of(data.heldout)[0].reshape(-1)) == {7}


@pytest.mark.parametrize("kind", ["uint16", "uint32", "npy"])
def test_each_way_that_tokens_are_written(tmp_path: Path, kind: str) -> None:
    row = np.arange(200) % 90
    if kind == "npy":
        np.save(tmp_path / "a.npy", row.astype(np.int32))
    else:
        row.astype(kind).tofile(tmp_path / "a.bin")
    args: dict[str, Any] = {} if kind == "npy" else {"dtype": kind}
    data = tokens(tmp_path, vocab_size=90, **args)
    assert np.array_equal(rows_of(data.train)[0].reshape(-1), row[: len(data.train) * 8])
    assert data.info.facts == {"vocab_size": 90, "seq_len": 8}


def test_the_models_vocabulary_is_taken_where_none_is_given(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "a.bin")
    section = DataSection(name="tokens", dir=str(tmp_path), seq_len=8)
    assert build_dataset(section, {"vocab_size": 512}).info.facts["vocab_size"] == 512
    with pytest.raises(ConfigError, match=r"HINT: --data.args.vocab_size"):
        build_dataset(section)


def test_without_files_the_message_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no token file to train on.*HINT: put \*\.bin"):
        tokens(tmp_path)
    with pytest.raises(ConfigError, match=r"--data.dir .*/none is not a folder"):
        tokens(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"needs the folder.*HINT: --data.dir FOLDER"):
        build_dataset(DataSection(name="tokens", args={"vocab_size": 9}))


def test_a_vocabulary_too_small_is_seen_before_the_run(tmp_path: Path) -> None:
    np.array([1, 2, 3, 1500] * 20, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=r"a.bin has token 1500, beyond --data.args.vocab_size 1000.*vocab_size 1501"):
        tokens(tmp_path)


def test_a_token_beyond_the_vocabulary_deep_inside_is_seen_when_read(tmp_path: Path) -> None:
    row = np.zeros(300_000, dtype=np.uint16)
    row[150_000] = 1500
    row.tofile(tmp_path / "a.bin")
    data = tokens(tmp_path)
    with pytest.raises(TrainingError, match=r"token 1500, beyond --data.args.vocab_size 1000"):
        data.train.batch(np.array([150_000 // 8]))


def test_files_that_are_not_tokens_are_named(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"123")
    with pytest.raises(ConfigError, match=r"odd.bin has 3 bytes, not whole tokens of 2"):
        tokens(tmp_path)
    (tmp_path / "odd.bin").unlink()
    np.save(tmp_path / "float.npy", np.zeros(100))
    with pytest.raises(ConfigError, match=r"float.npy holds float64 \[100\]"):
        tokens(tmp_path)
    (tmp_path / "float.npy").write_bytes(b"no numpy file")
    with pytest.raises(ConfigError, match=r"float.npy is not a whole .npy file"):
        tokens(tmp_path)


def test_a_row_too_short_for_one_sample_is_named(tmp_path: Path) -> None:
    np.arange(20, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=r"has 20 tokens to train on: not one sample of --data.seq_len 64"):
        tokens(tmp_path, seq_len=64)


def test_more_files_than_may_be_open_at_once(tmp_path: Path) -> None:
    for place in range(300):
        np.full(10, place, dtype=np.uint16).tofile(tmp_path / f"{place:03}.bin")
    data = tokens(tmp_path, seq_len=10, heldout=0)
    assert data.heldout is None
    assert np.array_equal(rows_of(data.train)[0][:, 0], np.arange(299))
