"""--data.name and --data.args: what is known, what is a person's own, and what each mistake is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

from fsdp.base.errors import ConfigError, OneRankError
from fsdp.config import DataSection
from fsdp.data import DataSet, build_dataset


def build(name: str, facts: dict[str, Any] | None = None, seq_len: int = 256, **args: Any) -> DataSet:
    return build_dataset(DataSection(name=name, seq_len=seq_len, args=args), facts)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("digit", {}, r"--data.name digit is not digits, fashion_mnist, .*HINT: --data.name digits$"),
        ("digits", {"size": 3}, r"--data.args.size is not an argument of --data.name digits. HINT: it acc"),
        ("synthetic", {"sample": 3}, r"not an argument of .* HINT: --data.args.samples VALUE"),
        ("synthetic", {"samples": "many"}, r"samples many is not int. HINT: --data.args.samples 100000"),
        ("synthetic", {"samples": 0}, r"--data.args.samples 0 is not .* HINT: --data.args.samples 1"),
        ("synthetic", {"kind": "sounds"}, r"--data.args.kind sounds is not auto or images or tokens"),
        ("synthetic", {"kind": "tokens", "channels": 3}, r"--data.args.channels 3 has no effect on tokens"),
    ],
)
def test_each_mistake_has_a_line_that_mends_it(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(name, **args)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- a file or folder by its path


def test_a_name_that_is_a_path_is_read_by_what_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "a.txt").write_text("words " * 500, encoding="utf-8")
    (tmp_path / "ids").mkdir()
    np.arange(600, dtype=np.uint16).tofile(tmp_path / "ids" / "a.bin")
    for name in ("cat", "dog"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "pictures" / name / "a.png")
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "plots").symlink_to(tmp_path / "pictures")
    for number in range(5):
        (tmp_path / "pages" / f"{number}.md").write_text("words " * 99, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert build("pages").info.kind == "text"
    assert build("words").info.preprocess["tokenizer"] == "bytes"
    assert build("words/a.txt").info.preprocess["tokenizer"] == "bytes"
    assert build("ids", seq_len=8, vocab_size=700).info.facts["vocab_size"] == 700
    assert build(str(tmp_path / "ids" / "a.bin"), seq_len=8, vocab_size=700).info.facts["vocab_size"] == 700
    assert build("pictures", image_size=8).info.class_names == ("cat", "dog")


# ---------------------------------------------------------------- synthetic


# ---------------------------------------------------------------- a person's own


class Pairs(Dataset[Any]):
    classes: Any = ("cat", "dog")

    def __init__(self, count: int = 12) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return np.full((3, 4, 4), index, np.float32), index % 2


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield 1, 2


class Sized(Stream):
    def __len__(self) -> int:
        return 1


class Bad(Pairs):
    def __getitem__(self, index: int) -> Any:
        return index, index, index


class Counted(Pairs):
    classes = 10


class Flat(Pairs):
    def collate(self, items: list[Any]) -> Any:
        return {"inputs": torch.stack([torch.as_tensor(x) for x, _ in items]), "scale": torch.tensor(2.0)}


class Ragged(Pairs):
    classes = None

    def __getitem__(self, index: int) -> Any:
        return torch.arange(index % 4 + 2), torch.arange(index % 4 + 2)


class Padded(Ragged):
    def collate(self, items: list[Any]) -> Any:
        pad: Any = torch.nn.utils.rnn.pad_sequence
        inputs, targets = zip(*items, strict=True)
        return {"input_ids": pad(inputs, True), "targets": pad(targets, True, -100).numpy()}


def with_heldout(count: int, test: int = 3) -> Any:
    return Pairs(count), Pairs(test)


def three() -> Any:
    return Pairs(), Pairs(), Pairs()


def broken() -> Any:
    return 1 / 0


@pytest.mark.parametrize(
    ("factory", "args", "message"),
    [
        ("pear", {}, r"has no attribute .*pear"),
        ("Pairs", {"cuont": 3}, r"cuont is not an argument of .* HINT: --data.args.count VALUE"),
        ("with_heldout", {}, r"with_heldout needs count. HINT: --data.args.count VALUE"),
        ("Bad", {}, r"sample 0 cannot be read: TypeError: an item is a tuple, neither "),
        ("Counted", {}, r"Counted: classes is 10\. HINT: classes = "),
        ("Flat", {}, r"Flat: scale of a batch is not a tensor with a row for each item\. HINT: "),
        ("three", {}, r"returned a tuple, not a Dataset with items by index"),
        ("broken", {}, r"failed: ZeroDivisionError: division by zero \(.*test_registry.py:\d+\)"),
    ],
)
def test_what_is_wrong_with_ones_own_is_said(factory: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(f"{__name__}:{factory}", **args)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Stream", "Sized"])
def test_an_iterable_is_a_stream_though_it_has_a_length(name: str) -> None:
    assert build(f"{__name__}:{name}").stream is not None


def test_a_datasets_own_collate_makes_the_batches_of_unlike_samples() -> None:
    with pytest.raises(OneRankError, match=r"samples .*: those of one batch must have one shape: .* collate"):
        build(f"{__name__}:Ragged").train.batch(np.array([0, 1]))
    data = build(f"{__name__}:Padded")
    assert data.info.kind == "text"
    batch = data.train.batch(np.array([0, 3]))
    assert batch["inputs"].tolist() == [[0, 1, 0, 0, 0], [0, 1, 2, 3, 4]]
    assert batch["targets"].tolist() == [[0, 1, -100, -100, -100], [0, 1, 2, 3, 4]]
