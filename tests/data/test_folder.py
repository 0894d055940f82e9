"""Folders of pictures: torchvision's layout, a tensor as torchvision's transforms make it, broken pictures by
name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fsdp.base.errors import TrainingError
from fsdp.config import DataSection
from fsdp.data import Cursor, DataSet, Loader, build_dataset
from fsdp.data.images import ImageFiles
from fsdp.distributed.mesh import DataRank
from tests.support.data_cache import own_cache as own_cache

GREY = {"image_size": 8, "channels": 1, "mean": (0.5,), "std": (0.5,)}


def folder(root: Path, **args: Any) -> DataSet:
    return build_dataset(DataSection(name="folder", dir=str(root), args={"image_size": 8, **args}))


def paint(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (12, 10)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def make_two_classes(root: Path, count: int = 20) -> None:
    for n in range(count):
        paint(root / "red" / f"{n:02}.png", (255, n, 0))
        paint(root / "blue" / f"{n:02}.png", (n, 0, 255))


def test_classes_are_the_folders_in_order_and_a_tenth_is_held_out(tmp_path: Path) -> None:
    make_two_classes(tmp_path)
    data = folder(tmp_path)
    assert data.heldout is not None
    assert data.info.class_names == ("blue", "red")
    assert (len(data.train), len(data.heldout)) == (36, 4)
    assert data.heldout.batch(np.arange(4))["targets"].tolist() == [0, 0, 1, 1]
    facts = {"num_classes": 2, "image_size": 8, "channels": 3, "fingerprint": ""}
    assert {**data.info.facts, "fingerprint": ""} == facts


def test_a_tensor_is_what_torchvisions_transforms_make(tmp_path: Path) -> None:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import CenterCrop, Compose, Normalize, Resize, ToTensor

    random = np.random.default_rng(0)
    for n, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        for k in range(2):
            picture = random.integers(0, 255, (16 + 4 * k, 16, 3), np.uint8)
            Image.fromarray(picture).save(tmp_path / name / f"{n}{k}.png")
    steps = [Resize(16), CenterCrop(16), ToTensor(), Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
    theirs = ImageFolder(str(tmp_path), transform=Compose(steps))
    ours = folder(tmp_path, image_size=16).train.batch(np.arange(4))
    assert torch.equal(ours["inputs"], torch.stack([picture for picture, _ in theirs]))
    assert ours["targets"].tolist() == [label for _, label in theirs]


def test_files_of_sixteen_bits_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(tmp_path / "a.png")
    with pytest.raises(OSError, match=r"a.png: pixels of mode I;16, not of 8 bits: save 8 bits"):
        ImageFiles([(str(tmp_path / "a.png"), 0)], GREY).batch(np.array([0]))


def test_a_broken_picture_is_named_with_rank_and_step(tmp_path: Path) -> None:
    make_two_classes(tmp_path, 4)
    whole = (tmp_path / "red" / "02.png").read_bytes()
    (tmp_path / "red" / "02.png").write_bytes(whole[: len(whole) // 2])
    train = folder(tmp_path).train
    cursor = Cursor(seed=0, samples=8, global_batch=8)
    loader = Loader(
        train, cursor, micro_batch=8, accumulation=1, rank=DataRank(0, 1), workers=1, prefetch=1, pin=False
    )
    with pytest.raises(
        TrainingError, match=r"rank 0, step 1: sample 6 cannot be read: OSError: .*red/02.png"
    ):
        loader.step(0)
    loader.close()


@pytest.mark.parametrize(("train", "val"), [("train", "val"), ("training", "valid"), ("trainval", "test")])
def test_folders_named_after_splits_are_splits(
    train: str, val: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model learned to tell the training images from the others."""
    make_two_classes(tmp_path / train)
    make_two_classes(tmp_path / val, 2)
    with caplog.at_level("INFO"):
        data = folder(tmp_path)
    assert data.heldout is not None
    assert (len(data.train), len(data.heldout)) == (40, 4)
    assert data.info.class_names == ("blue", "red")
    assert f"{tmp_path}/{val}: held out" in caplog.text


def test_images_come_in_the_order_of_a_walk(tmp_path: Path) -> None:
    """The order of runs that began before torchvision listed the images."""
    for name in ("b/z.png", "b/a/1.png", "b/a-b/1.png", "b/a/c/1.png", "b/B.png", "c/1.png"):
        paint(tmp_path / name, (1, 2, 3))
    paths: list[str] = folder(tmp_path).train.paths  # type: ignore[attr-defined]
    names = [str(Path(path).relative_to(tmp_path)) for path in paths]
    assert names == ["b/B.png", "b/z.png", "b/a/1.png", "b/a/c/1.png", "c/1.png"]
