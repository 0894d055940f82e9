"""Folders of pictures: torchvision's layout, a tensor as torchvision's transforms make it, broken pictures by
name.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fsdp.base.errors import ConfigError, TrainingError
from fsdp.config import DataSection
from fsdp.data import Cursor, DataSet, Loader, build_dataset
from fsdp.data import folder as folders
from fsdp.data.images import prepare, to_picture
from fsdp.dist.mesh import DataRank
from tests.support.data_cache import own_cache as own_cache

GREY = {"image_size": 8, "channels": 1, "mean": (0.5,), "std": (0.5,)}
COLOUR = {"image_size": 8, "channels": 3, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


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


def test_train_and_val_folders_are_what_they_say(tmp_path: Path) -> None:
    make_two_classes(tmp_path / "train", 5)
    make_two_classes(tmp_path / "val", 2)
    data = folder(tmp_path)
    assert data.heldout is not None
    assert (len(data.train), len(data.heldout)) == (10, 4)


def test_a_tensor_is_what_torchvisions_transforms_make(tmp_path: Path) -> None:
    from fsdp.base.torchvision_import import import_torchvision

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


def test_the_middle_is_cut_out_and_grey_is_grey(tmp_path: Path) -> None:
    picture = Image.new("RGB", (24, 8), (255, 0, 0))
    picture.paste((255, 255, 255), (8, 0, 16, 8))
    assert np.array_equal(prepare(picture, COLOUR), np.ones((3, 8, 8), np.float32))
    assert np.array_equal(prepare(picture, GREY), np.ones((1, 8, 8), np.float32))


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


def test_sixteen_bits_keep_their_greys() -> None:
    steep = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    found = prepare(Image.fromarray(steep), GREY)
    assert np.abs(found[0] - (steep / 65535 * 2 - 1)).max() < 0.02


@pytest.mark.parametrize("name", ["a.png", "a.pgm", "a.tiff"])
def test_files_of_sixteen_bits_keep_their_greys(name: str, tmp_path: Path) -> None:
    steep = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(steep).save(tmp_path / name)
    with Image.open(tmp_path / name) as image:
        found = prepare(image, GREY)
    assert np.abs(found[0] - (steep / 65535 * 2 - 1)).max() < 0.02


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.linspace(0, 1, 64, dtype=np.float32), "from 0 to 1, not from 0 to 255"),
        (np.linspace(-3, 9, 64, dtype=np.float32), "from -3 to 9, not"),
        (np.full(64, np.nan, np.float32), "from nan to nan, not"),
        (np.linspace(0, 65535, 64).astype(np.int32), "from 0 to 65535, not"),
        (np.linspace(0, 255, 64, dtype=np.float32), ""),
        (np.arange(64, dtype=np.int32), ""),
    ],
)
def test_pixels_of_32_bits_are_those_of_8_or_refused(values: np.ndarray, said: str, tmp_path: Path) -> None:
    picture = tmp_path / "a.tif"
    Image.fromarray(values.reshape(8, 8)).save(picture)
    samples = folders.ImageFiles([str(picture)], np.zeros(1, np.int64), GREY)
    if said:
        with pytest.raises(OSError, match=said) as raised:
            samples.batch(np.array([0]))
        assert str(picture) in str(raised.value)
    else:
        found = samples.batch(np.array([0]))["inputs"][0, 0].numpy()
        assert np.abs(found - (values.reshape(8, 8) / 127.5 - 1)).max() < 0.02


def test_pictures_of_other_formats_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a/1.png", "b/1.png", "b/2.png"):
        paint(tmp_path / name, (1, 2, 3))
    for name in ("a/x.GIF", "b/y.gif", "b/z.heic", "b/.hidden.gif", "b/notes.txt"):
        (tmp_path / name).touch()
    assert len(folder(tmp_path).train) == 3
    assert [one.getMessage().partition(" below")[0] for one in caplog.records] == [
        "folder: 2 .gif, 1 .heic files"
    ]


@pytest.mark.parametrize("mode", ["1", "P", "PA", "LA", "RGBA", "CMYK", "YCbCr", "HSV"])
def test_each_mode_of_pixels_is_read(mode: str) -> None:
    white = Image.new("RGB", (8, 8), (255, 255, 255))
    image = (white.convert("P") if mode == "PA" else white).convert(mode)
    assert np.array_equal(prepare(image, COLOUR), np.ones((3, 8, 8), np.float32))


def test_a_picture_comes_back_as_it_was() -> None:
    random = np.random.default_rng(1).integers(0, 256, (8, 8, 3), np.uint8)
    assert np.array_equal(to_picture(prepare(Image.fromarray(random), COLOUR), COLOUR), random)


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


def huge_header(path: Path) -> None:
    """A PNG that claims 60,000 × 60,000 pixels, which Pillow refuses to decode."""
    head = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 100) + b"IDAT" + bytes(100))


def test_a_picture_of_too_many_pixels_is_named(tmp_path: Path) -> None:
    make_two_classes(tmp_path, 2)
    huge_header(tmp_path / "red" / "00.png")
    with pytest.raises(OSError, match=r"red/00.png: Image size .* exceeds limit"):
        folder(tmp_path).train.batch(np.array([2]))


def test_hidden_files_are_left_out(tmp_path: Path) -> None:
    """As macOS and notebooks write them beside pictures."""
    make_two_classes(tmp_path, 3)
    plain = folder(tmp_path)
    (tmp_path / "red" / "._00.png").write_bytes(b"Mac OS X")
    paint(tmp_path / "red" / ".ipynb_checkpoints" / "00-checkpoint.png", (255, 0, 0))
    assert len(folder(tmp_path).train) == len(plain.train)


def test_pictures_of_other_classes_have_another_fingerprint(tmp_path: Path) -> None:
    make_two_classes(tmp_path / "a", 3)
    before = folder(tmp_path / "a").info.facts["fingerprint"]
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert folder(tmp_path / "b").info.facts["fingerprint"] == before
    (tmp_path / "a/red/00.png").rename(tmp_path / "a/blue/x.png")
    assert folder(tmp_path / "a").info.facts["fingerprint"] != before


def test_one_class_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paint(tmp_path / "all" / "a.png", (1, 2, 3))
    assert folder(tmp_path).info.facts["num_classes"] == 1
    assert "has one class, all: the cross entropy of each image is 0. HINT: " in caplog.text


@pytest.mark.parametrize("split", ["valid", "validation", "test"])
def test_a_split_of_another_name_is_a_warning_and_the_hint_reads_it(
    split: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_two_classes(tmp_path / "train")
    make_two_classes(tmp_path / split, 2)
    assert len(folder(tmp_path).train) == 36
    hint = f"{split} is not read. HINT: ln -s {split} {tmp_path}/val reads it as held-out images"
    assert f"folder: {tmp_path} has no val: a tenth of train is held out, and {hint}" in caplog.text
    (tmp_path / "val").symlink_to(split)
    data = folder(tmp_path)
    assert data.heldout is not None
    assert (len(data.train), len(data.heldout)) == (40, 4)


def test_of_two_other_splits_the_hints_name_the_one_for_validation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a/train", "a/test", "a/valid", "b/Train", "b/Test", "b/Val"):
        make_two_classes(tmp_path / name, 2)
    folder(tmp_path / "a")
    assert f"test and valid is not read. HINT: ln -s valid {tmp_path}/a/val reads it" in caplog.text
    with pytest.raises(ConfigError, match=r"HINT: mv \S+/Train \S+/train; mv \S+/Val \S+/val$"):
        folder(tmp_path / "b")


@pytest.mark.parametrize(
    ("train", "val"), [("Train", "Val"), ("training", "validation"), ("trainval", "test")]
)
def test_splits_are_no_classes(train: str, val: str, tmp_path: Path) -> None:
    """The model learned to tell the training images from the others."""
    make_two_classes(tmp_path / train)
    make_two_classes(tmp_path / val)
    names = ", ".join(sorted([train, val]))
    said = (
        rf"{tmp_path} are {names}: splits, not classes. HINT: mv \S+{train} \S+/train; mv \S+{val} \S+/val$"
    )
    with pytest.raises(ConfigError, match=said):
        folder(tmp_path)


@pytest.mark.parametrize(
    ("trains", "others"),
    [
        (["train1", "train2"], ["val"]),
        (["Train_1", "train-2", "training"], ["Val", "dev"]),
        (["Train"], ["val"]),
    ],
)
def test_the_hint_for_splits_reads_every_image_to_train_on(
    trains: list[str], others: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It moved the first of several folders, and the others were left unread."""
    root = tmp_path / "my pictures"
    for name in trains + others:
        make_two_classes(root / name, 2)
    with pytest.raises(ConfigError, match=r"splits, not classes\. HINT: ") as caught:
        folder(root)
    subprocess.run(["bash", "-euc", str(caught.value.hint)], check=True, cwd=tmp_path)
    data = folder(root)
    assert data.heldout is not None
    assert (len(data.train), len(data.heldout)) == (4 * len(trains), 4)
    assert "not read" not in caplog.text


def test_a_second_folder_to_train_on_is_a_warning_and_the_hint_reads_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("train", "train2", "train_masks", "val"):
        make_two_classes(tmp_path / name, 2)
    assert len(folder(tmp_path).train) == 4
    said = f"folder: {tmp_path} has train, and train2 is not read. HINT: "
    assert said in caplog.text
    hint = caplog.text.partition(said)[2].partition(" moves its images")[0]
    subprocess.run(["bash", "-euc", hint], check=True)
    assert len(folder(tmp_path).train) == 8


@pytest.mark.parametrize("name", ["train_and_val.csv", "train_and_val.jsonl", "metadata.tsv"])
def test_a_table_beside_the_classes_is_a_warning(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Folders such as part1 and part2 were the classes, and the labels of the table not read, in silence."""
    make_two_classes(tmp_path)
    (tmp_path / name).write_text("file,label\nred/00.png,a\n")
    data = build_dataset(DataSection(name=str(tmp_path), args={"image_size": 8}))
    assert data.info.class_names == ("blue", "red")
    assert f"folder: {name} of {tmp_path} is not read: the classes are the folders. HINT: " in caplog.text


def test_splits_within_train_are_read_by_the_hint(tmp_path: Path) -> None:
    for name in ("train", "val"):
        make_two_classes(tmp_path / "train" / name, 2)
    with pytest.raises(ConfigError, match=r"splits, not classes\. HINT: ") as caught:
        folder(tmp_path)
    assert caught.value.hint == f"--data.name folder --data.dir {tmp_path}/train"
    assert len(folder(tmp_path / "train").train) == 4


def test_one_name_in_two_forms_of_unicode_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = "caf\u00e9", "cafe\u0301"
    paint(tmp_path / "a/train" / one / "1.png", (1, 2, 3))
    paint(tmp_path / "a/val" / other / "1.png", (1, 2, 3))
    with pytest.raises(
        ConfigError, match=r"has class 'cafe\\u0301', which train has as 'caf\\xe9'.* HINT: mv "
    ):
        folder(tmp_path / "a")
    for name in (one, other, "tea"):
        paint(tmp_path / "b" / name / "1.png", (1, 2, 3))
    assert folder(tmp_path / "b").info.facts["num_classes"] == 3
    assert r"two classes of one name, 'cafe\u0301' and 'caf\xe9'" in caplog.text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"channels": 2}, r"--data.args.channels 2 is not 1 \(grey\) or 3"),
        ({"mean": [0.5]}, r"--data.args.mean \[0.5\] is not 3 numbers"),
        ({"std": [1, 1, 0]}, r"--data.args.std .* is not 3 numbers above 0"),
        ({"image_size": 0}, r"--data.args.image_size 0 is not at least 1"),
    ],
)
def test_arguments_that_cannot_be(tmp_path: Path, args: dict[str, Any], message: str) -> None:
    make_two_classes(tmp_path, 1)
    with pytest.raises(ConfigError, match=message):
        folder(tmp_path, **args)


def test_folders_that_hold_nothing_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs a folder of images.*HINT: --data.dir FOLDER"):
        build_dataset(DataSection(name="folder"))
    with pytest.raises(ConfigError, match=r"/none is not a folder"):
        folder(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"has no folder per class"):
        folder(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"/empty has no image in it .* HINT: mv .*/empty .*/.empty: hid"):
        folder(tmp_path)
    make_two_classes(tmp_path, 2)
    (tmp_path / "empty").rename(tmp_path / ".empty")
    assert folder(tmp_path).info.class_names == ("blue", "red")


def test_a_class_that_only_val_has_is_named(tmp_path: Path) -> None:
    make_two_classes(tmp_path / "train", 2)
    paint(tmp_path / "val" / "green" / "0.png", (0, 255, 0))
    with pytest.raises(ConfigError, match=r"val has class green, which train does not have"):
        folder(tmp_path)


@pytest.mark.parametrize("at", ["cat/all", "cat/deep/again"])
def test_a_link_to_a_folder_above_is_named(tmp_path: Path, at: str) -> None:
    """Followed, it gave each picture 40 times, or a traceback."""
    for name in ("cat/deep", "dog"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name / "a.png")
    (tmp_path / at).symlink_to("..", target_is_directory=True)
    with pytest.raises(ConfigError, match=rf"{at} is a link to .*, a folder above it\. HINT: rm .*{at}"):
        build_dataset(DataSection(name="folder", dir=str(tmp_path)))
