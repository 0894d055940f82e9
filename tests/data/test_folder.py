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

from fsdp.base.errors import ConfigError, TrainingError
from fsdp.config import DataSection
from fsdp.data import Cursor, DataSet, Loader, build_dataset
from fsdp.data.images import ImageFiles, prepare
from fsdp.dist.mesh import DataRank
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
    from fsdp.base.torch_private import import_torchvision

    import_torchvision()
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


def test_a_photographs_rotation_is_followed(tmp_path: Path) -> None:
    picture = Image.new("L", (8, 8), 0)
    picture.paste(255, (0, 0, 8, 4))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    picture.save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as turned:
        found = prepare(turned, GREY)
    assert found[0, :4].max() == -1
    assert found[0, 4:].min() == 1


@pytest.mark.parametrize("name", ["a.png", "a.pgm"])
def test_files_of_sixteen_bits_keep_their_greys(name: str, tmp_path: Path) -> None:
    steep = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(steep).save(tmp_path / name)
    with Image.open(tmp_path / name) as image:
        found = prepare(image, GREY)
    assert np.abs(found[0] - (steep / 65535 * 2 - 1)).max() < 0.02


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.linspace(0, 1, 64, dtype=np.float32), "from 0 to 1, not"),
        (np.linspace(0, 65535, 64).astype(np.int32), "from 0 to 65535, not"),
        (np.linspace(0, 255, 64, dtype=np.float32), ""),
        (np.arange(64, dtype=np.int32), ""),
    ],
)
def test_pixels_of_32_bits_are_those_of_8_or_refused(values: np.ndarray, said: str, tmp_path: Path) -> None:
    picture = tmp_path / "a.tif"
    Image.fromarray(values.reshape(8, 8)).save(picture)
    samples = ImageFiles([(str(picture), 0)], GREY)
    if said:
        with pytest.raises(OSError, match=said) as raised:
            samples.batch(np.array([0]))
        assert str(picture) in str(raised.value)
    else:
        found = samples.batch(np.array([0]))["inputs"][0, 0].numpy()
        assert np.abs(found - (values.reshape(8, 8) / 127.5 - 1)).max() < 0.02


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
        TrainingError, match=r"rank 0, step 0: sample 6 cannot be read: OSError: .*red/02.png"
    ):
        loader.step(0)
    loader.close()


def test_hidden_files_are_left_out(tmp_path: Path) -> None:
    """As macOS and notebooks write them beside pictures."""
    make_two_classes(tmp_path, 3)
    plain = folder(tmp_path)
    (tmp_path / "red" / "._00.png").write_bytes(b"Mac OS X")
    paint(tmp_path / "red" / ".ipynb_checkpoints" / "00-checkpoint.png", (255, 0, 0))
    assert len(folder(tmp_path).train) == len(plain.train)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_split_of_another_name_is_a_warning_and_the_hint_reads_it(
    split: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_two_classes(tmp_path / "train")
    make_two_classes(tmp_path / split, 2)
    assert len(folder(tmp_path).train) == 36
    hint = f"HINT: ln -s {split} {tmp_path}/val reads it as held-out images"
    assert f"folder: {tmp_path} has no val: a tenth of train is held out. {hint}" in caplog.text
    (tmp_path / "val").symlink_to(split)
    data = folder(tmp_path)
    assert data.heldout is not None
    assert (len(data.train), len(data.heldout)) == (40, 4)


@pytest.mark.parametrize(
    ("train", "val"), [("Train", "Val"), ("training", "validation"), ("trainval", "test")]
)
def test_splits_are_no_classes(train: str, val: str, tmp_path: Path) -> None:
    """The model learned to tell the training images from the others."""
    make_two_classes(tmp_path / train)
    make_two_classes(tmp_path / val)
    names = ", ".join(sorted([train, val]))
    with pytest.raises(ConfigError, match=rf"{tmp_path} are {names}: splits, not classes. HINT: move "):
        folder(tmp_path)


def test_images_come_in_the_order_of_a_walk(tmp_path: Path) -> None:
    """The order of runs that began before torchvision listed the images."""
    for name in ("b/z.png", "b/a/1.png", "b/a-b/1.png", "b/a/c/1.png", "b/B.png", "c/1.png"):
        paint(tmp_path / name, (1, 2, 3))
    paths: list[str] = folder(tmp_path).train.paths  # type: ignore[attr-defined]
    names = [str(Path(path).relative_to(tmp_path)) for path in paths]
    assert names == ["b/B.png", "b/z.png", "b/a/1.png", "b/a/c/1.png", "c/1.png"]
