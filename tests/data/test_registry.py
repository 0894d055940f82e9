"""--data.name and --data.args: what is known, what is a person's own, and what each mistake is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fsdp.base.errors import ConfigError, TrainingError
from fsdp.config import DataSection
from fsdp.data import Cursor, DataSet, Loader, build_dataset
from fsdp.dist.mesh import DataRank


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
    monkeypatch.chdir(tmp_path)
    assert build("words").info.preprocess["tokenizer"] == "bytes"
    assert build("words/a.txt").info.preprocess["tokenizer"] == "bytes"
    assert build("ids", seq_len=8, vocab_size=700).info.facts["vocab_size"] == 700
    assert build(str(tmp_path / "ids" / "a.bin"), seq_len=8, vocab_size=700).info.facts["vocab_size"] == 700
    assert build("pictures", image_size=8).info.class_names == ("cat", "dog")


def test_a_home_folder_in_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "words.txt").write_text("words " * 500, encoding="utf-8")
    np.arange(600, dtype=np.uint16).tofile(tmp_path / "a.bin")
    assert build("~/words.txt").info.preprocess["tokenizer"] == "bytes"
    assert len(build("~/a.bin", seq_len=8, vocab_size=700).train)
    section = DataSection(name="tokens", dir="~", seq_len=8, args={"vocab_size": 700})
    assert len(build_dataset(section).train)
    with pytest.raises(ConfigError, match=r"--data.name ~no-such-user/a.bin is not digits, "):
        build("~no-such-user/a.bin")


def test_a_path_with_nothing_to_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(bytes(1000))
    with pytest.raises(
        ConfigError, match=r"/a.gz is not text in UTF-8 at byte 0, which is zero\. HINT: file "
    ):
        build(str(tmp_path / "a.gz"))
    with pytest.raises(ConfigError, match=r"a file or folder here, .* or .* HINT: ls /.*"):
        build(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"a file or folder here, .* HINT: ls \.$"):
        build("corpus.txt")
    with pytest.raises(ConfigError, match=r"--data.name is not given: .* HINT: --data.name text"):
        build("")


# ---------------------------------------------------------------- synthetic


def test_synthetic_samples_are_the_same_however_they_are_asked_for() -> None:
    for data in (build("synthetic"), build("synthetic", kind="tokens", vocab_size=99, seq_len=16)):
        together = data.train.batch(np.arange(10))
        alone = data.train.batch(np.array([7]))
        assert torch.equal(together["inputs"][7:8], alone["inputs"])
        assert torch.equal(together["targets"][7:8], alone["targets"])
        assert len(torch.unique(together["inputs"].flatten(1), dim=0)) == 10


# ---------------------------------------------------------------- a person's own

MINE = """
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset


class Pairs(Dataset):
    classes = ["cat", "dog"]

    def __init__(self, count=12):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index >= self.count:
            raise IndexError(index)
        return np.full((3, 4, 4), index, np.float32), index % 2


class Stream(IterableDataset):
    def __iter__(self):
        yield 1, 2


class Sized(Stream):
    def __len__(self):
        return 1


class Bad(Pairs):
    def __getitem__(self, index):
        return index, index, index


class Arrays(Pairs):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def __getitem__(self, index):
        row = np.array([index, 3], self.dtype)
        more = {"labels": row[0], "weight": np.float64(0.5), "tensor": torch.from_numpy(row)}
        return {"inputs": row, "targets": row, **more}


class Counted(Pairs):
    classes = 10


class Flat(Pairs):
    def collate(self, items):
        return {"inputs": torch.stack([torch.as_tensor(one) for one, _ in items]), "scale": torch.tensor(2.0)}


def pairs(count=12): return Pairs(count)
def with_heldout(count, test=3): return Pairs(count), Pairs(test)
def stream(): return Stream()
def sized(): return Sized()
def bad(): return Bad()
def arrays(dtype): return Arrays(dtype)
def counted(): return Counted()
def flat(): return Flat()
def three(): return Pairs(), Pairs(), Pairs()
def broken(): return 1 / 0
"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_own_data.py").write_text(MINE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_own_data", None)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_targets_of_whole_numbers_are_int64(dtype: str) -> None:
    batch = build("my_own_data:arrays", dtype=dtype).train.batch(np.array([7, 5]))
    for name in ("targets", "labels"):
        assert batch[name].dtype == torch.int64
    assert batch["targets"].tolist() == [[7, 3], [5, 3]]
    assert batch["labels"].tolist() == [7, 5]
    for name in ("inputs", "tensor"):
        assert batch[name].dtype in (torch.int64, getattr(torch, dtype))
        assert batch[name].dtype not in (torch.uint16, torch.uint32)
    assert batch["weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("factory", "args", "message"),
    [
        ("my_own_data:pear", {}, r"has no pear"),
        ("my_own_data:pairs", {"cuont": 3}, r"cuont is not an argument of .* HINT: --data.args.count VALUE"),
        ("my_own_data:with_heldout", {}, r"with_heldout needs count. HINT: --data.args.count VALUE"),
        ("my_own_data:stream", {}, r"a stream of type Stream, which has no length and no state_dict: .*HINT"),
        ("my_own_data:sized", {}, r"of type Sized, which has no items by index and no state_dict: .*HINT"),
        ("my_own_data:bad", {}, r"sample 0 cannot be read: TypeError: an item is a tuple, neither "),
        ("my_own_data:counted", {}, r"counted: classes is 10\. HINT: classes = "),
        ("my_own_data:flat", {}, r"flat: scale of a batch is not a tensor with a row for each item\. HINT: "),
        ("my_own_data:three", {}, r"returned a tuple, not a Dataset with items by index"),
        ("my_own_data:broken", {}, r"failed: ZeroDivisionError: division by zero \(.*my_own_data.py:\d+\)"),
    ],
)
def test_what_is_wrong_with_ones_own_is_said(factory: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(factory, **args)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- batches of one's own making

RAGGED = """
import torch
from torch.utils.data import Dataset


class Ragged(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.arange(index % 4 + 2), torch.arange(index % 4 + 2)


class Padded(Ragged):
    def collate(self, items):
        pad = torch.nn.utils.rnn.pad_sequence
        inputs, targets = zip(*items)
        return {"input_ids": pad(inputs, True), "targets": pad(targets, True, -100).numpy()}


def ragged(): return Ragged()
def padded(): return Padded()
"""


@pytest.fixture
def ragged(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "my_ragged_data.py").write_text(RAGGED, encoding="utf-8")
    yield
    sys.modules.pop("my_ragged_data", None)


def all_in_one(data: DataSet) -> Loader:
    count = len(data.train)
    cursor = Cursor(seed=0, samples=count, global_batch=count)
    return Loader(
        data.train,
        cursor,
        micro_batch=count,
        accumulation=1,
        rank=DataRank(0, 1),
        workers=0,
        prefetch=1,
        pin=False,
    )


@pytest.mark.usefixtures("ragged")
def test_samples_of_unlike_lengths_are_named_and_the_hint_names_the_hook() -> None:
    message = r"^rank 0, step 0: samples .*: those of one batch must have one shape: .* HINT: give .* collate"
    with pytest.raises(TrainingError, match=message):
        all_in_one(build("my_ragged_data:ragged")).step(0)


@pytest.mark.usefixtures("ragged")
def test_a_datasets_own_collate_makes_the_batches() -> None:
    data = build("my_ragged_data:padded")
    assert data.info.kind == "text"
    batch = data.train.batch(np.array([0, 3]))
    assert batch["inputs"].tolist() == [[0, 1, 0, 0, 0], [0, 1, 2, 3, 4]]
    assert batch["targets"].tolist() == [[0, 1, -100, -100, -100], [0, 1, 2, 3, 4]]
    step = all_in_one(data).step(0)
    assert step.micro[0].tokens == sum(index % 4 + 2 for index in range(12))


@pytest.mark.parametrize("name", ["text", "tokens", "folder", "documents"])
def test_a_place_that_cannot_be_looked_at_is_one_line(name: str, tmp_path: Path) -> None:
    """As below a folder that may not be searched: pathlib raises where a missing place is False."""
    place = tmp_path / ("x" * 300)
    with pytest.raises(
        ConfigError, match=rf"^{place}.* cannot be read \(File name too long\). HINT: ls -ld {place}"
    ):
        build_dataset(DataSection(name=name, dir=str(place)))
