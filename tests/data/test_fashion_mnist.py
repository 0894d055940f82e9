"""fashion_mnist, from files in torchvision's layout: the same bits as torchvision's transforms."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from fsdp.base.errors import ConfigError
from fsdp.config import DataSection
from fsdp.data import build_dataset

COUNTS = {"train": 20, "t10k": 10}


def write_idx(path: Path, values: np.ndarray) -> None:
    head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    path.write_bytes(head + values.astype(np.uint8).tobytes())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    for split, count in COUNTS.items():
        write_idx(raw / f"{split}-images-idx3-ubyte", random.integers(0, 256, (count, 28, 28)))
        write_idx(raw / f"{split}-labels-idx1-ubyte", np.arange(count) % 10)
    return tmp_path


def test_samples_are_those_of_torchvision(folder: Path) -> None:
    data = build_dataset(DataSection(name="fashion_mnist", dir=str(folder)))
    assert data.heldout is not None
    assert (len(data.train), len(data.heldout)) == (20, 10)
    assert (data.info.class_names[0], data.info.class_names[-1]) == ("T-shirt/top", "Ankle boot")
    from torchvision.datasets import FashionMNIST
    from torchvision.transforms import Compose, Normalize, ToTensor

    theirs = FashionMNIST(str(folder), transform=Compose([ToTensor(), Normalize((0.5,), (0.5,))]))
    ours = data.train.batch(np.arange(20))
    assert torch.equal(ours["inputs"], torch.stack([image for image, _ in theirs]))
    assert ours["targets"].tolist() == [label for _, label in theirs]


def test_files_that_cannot_be_downloaded_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.datasets import FashionMNIST

    monkeypatch.setattr(FashionMNIST, "mirrors", ["http://127.0.0.1:1/"])
    with pytest.raises(ConfigError, match=r"FashionMNIST is not in .* downloaded: .* HINT: --data.dir"):
        build_dataset(DataSection(name="fashion_mnist", dir=str(tmp_path)))
