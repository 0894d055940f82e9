"""Data sets of images: digits, fashion_mnist and folder; and one image converted to a tensor.

    digits          1,797 real handwritten digits, stored beside this file and scaled to 28×28
                    (digits.LICENSE.md); the default. Their writers also wrote training digits: the held-out
                    accuracy does not measure reading the hand of a new writer.
    fashion_mnist   60,000 and 10,000 images of clothes, by torchvision, downloaded once per node
    folder          DIR/CLASS/…, or DIR/train/CLASS/… and DIR/val/CLASS/…, by torchvision's ImageFolder

Without held-out images of its own, the middle one of each ten of a class is held out, for every seed.
prepare() converts an image as in training; fsdp/predict/answers.py calls it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fsdp.base.errors import ConfigError, message_line
from fsdp.base.proc import cache_folder
from fsdp.base.text import quoted
from fsdp.data.types import DataInfo, DataSet, Where, check_range

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""As torchvision's ImageFolder reads them."""
DIGITS = Path(__file__).with_name("digits.npz")
SIZE, DIGIT_SIZE, INK, TOTAL = 28, 8, 16, 14
HALF = (0.5,)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


# ---------------------------------------------------------------- in memory


class PixelSamples:
    """Images [n, channels, height, width] of whole numbers 0 … steps, with labels."""

    def __init__(
        self, pixels: np.ndarray, labels: np.ndarray, steps: int, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        self.pixels, self.labels = pixels, labels
        self._table = normalise_table(steps, mean, std)

    def __len__(self) -> int:
        return len(self.pixels)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        chosen = self.pixels[indices]
        inputs = np.empty(chosen.shape, np.float32)
        for channel, table in enumerate(self._table):
            # mode "raise" would copy through a buffer
            np.take(table, chosen[:, channel], out=inputs[:, channel], mode="clip")
        return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(self.labels[indices])}


def normalise_table(steps: int, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Returns [channels, steps + 1], the normalised pixel values: the same bits as ToTensor and Normalize in
    fp32.
    """
    values = np.arange(steps + 1, dtype=np.float32) / np.float32(steps)
    return np.stack([(values - np.float32(m)) / np.float32(s) for m, s in zip(mean, std, strict=True)])


def every_tenth(labels: np.ndarray) -> np.ndarray:
    """Returns a mask of the middle one of each ten of a class: a fixed tenth, independent of the seed."""
    held = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        held[np.flatnonzero(labels == label)[4::10]] = True
    return held


def _info(class_names: Sequence[str], epochs: int, **more: Any) -> DataInfo:
    """Of grey images of 28×28."""
    sizes = {"image_size": SIZE, "channels": 1}
    facts = {"num_classes": len(class_names), **sizes}
    preprocess = {**sizes, "mean": HALF, "std": HALF, **more}
    names = tuple(class_names)
    return DataInfo(
        kind="images", facts=facts, class_names=names, default_epochs=epochs, preprocess=preprocess
    )


def digits(where: Where) -> DataSet:
    if where.dir:
        raise ConfigError(f"--data.dir {where.dir} has no effect on digits.", "leave it out")
    with np.load(DIGITS, allow_pickle=False) as file:
        images, labels = file["images"], file["labels"].astype(np.int64)
    pixels, held = draw(images)[:, None], every_tenth(labels)
    steps = INK * TOTAL**2
    """Full ink times the weights of both directions."""
    train, heldout = (PixelSamples(pixels[part], labels[part], steps, HALF, HALF) for part in (~held, held))
    return DataSet(train=train, heldout=heldout, info=_info("0123456789", 20, source_size=DIGIT_SIZE))


def draw(images: np.ndarray) -> np.ndarray:
    """Scales [n, 8, 8] of 0…16 to [n, 28, 28], bilinear, in whole numbers exact in fp32: the same bits on
    every processor. Output pixel i samples the source at (4i − 5) / 14 (half-pixel centres).
    """
    low, part = np.divmod(np.clip(4 * np.arange(SIZE) - 5, 0, (DIGIT_SIZE - 1) * TOTAL), TOTAL)
    weights = np.zeros((SIZE, DIGIT_SIZE), dtype=np.float32)
    weights[np.arange(SIZE), low] += TOTAL - part
    weights[np.arange(SIZE), np.minimum(low + 1, DIGIT_SIZE - 1)] += part
    return (weights @ images.astype(np.float32) @ weights.T).astype(np.int16)


def fashion_mnist(where: Where, *, mirror: str = "") -> DataSet:
    """The files are in DIR/FashionMNIST/raw, as torchvision leaves them."""
    from fsdp.base.torch_private import import_torchvision
    from fsdp.tokenize.rows import locked

    import_torchvision()
    from torchvision.datasets import FashionMNIST

    if mirror:
        FashionMNIST.mirrors = [f"{mirror.rstrip('/')}/"]
    root = Path(where.dir) if where.dir else cache_folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / ".fashion_mnist.lock"):  # one rank of a node downloads
            train, held = (FashionMNIST(str(root), train=part, download=True) for part in (True, False))
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"FashionMNIST is not in {root} and cannot be downloaded: {message_line(error)}.",
            "--data.dir FOLDER with the four .gz files as published in FOLDER/FashionMNIST/raw",
        ) from None
    parts = [
        PixelSamples(part.data.numpy()[:, None], part.targets.numpy(), 255, HALF, HALF)
        for part in (train, held)
    ]
    return DataSet(train=parts[0], heldout=parts[1], info=_info(train.classes, 5))


# ---------------------------------------------------------------- image files


def folder(
    where: Where,
    *,
    image_size: int = 224,
    channels: int = 3,
    mean: list | None = None,
    std: list | None = None,
) -> DataSet:
    from fsdp.tokenize.rows import is_other

    check_range("image_size", image_size, 1)
    sizes = {"image_size": image_size, "channels": channels}
    preprocess = {**sizes, **_normalisation(channels, mean, std)}
    root = Path(where.dir or ".")
    if not where.dir or not root.is_dir():
        raise ConfigError(
            f"--data.name folder needs a folder of images in --data.dir, not {where.dir or 'none'}.",
            "--data.dir FOLDER with FOLDER/CLASS/image.png, or FOLDER/train and FOLDER/val of those",
        )
    split = (root / "train").is_dir()
    classes, images = _images(root / "train" if split else root)
    if split and (root / "val").is_dir():
        names, held = _images(root / "val")
        if unknown := [name for name in names if name not in classes]:
            reason = f"{root / 'val'} has class {unknown[0]}, which train does not have."
            raise ConfigError(reason, f"add {unknown[0]} to train, or remove it")
        held = [(path, classes.index(names[label])) for path, label in held]
    else:
        others = sorted(entry.name for entry in root.iterdir() if is_other(entry.name)) if split else []
        if others:
            hint = f"HINT: ln -s {quoted(others[-1])} {quoted(root / 'val')} reads it as held-out images"
            log.warning("folder: %s has no val: a tenth of train is held out. %s", root, hint)
        mask = every_tenth(np.array([label for _, label in images], np.int64))
        held = [images[number] for number in np.flatnonzero(mask)]
        images = [images[number] for number in np.flatnonzero(~mask)]
    cut = len(str(root)) + 1
    lines = b"".join(b"%d %s\n" % (label, os.fsencode(path[cut:])) for path, label in images)
    fingerprint = hashlib.sha256(lines).hexdigest()[:16]
    info = DataInfo(
        kind="images",
        facts={"num_classes": len(classes), **sizes, "fingerprint": fingerprint},
        class_names=tuple(classes),
        default_epochs=10,
        preprocess=preprocess,
    )
    heldout = ImageFiles(held, preprocess) if held else None
    return DataSet(train=ImageFiles(images, preprocess), heldout=heldout, info=info)


def _normalisation(channels: int, mean: list | None, std: list | None) -> dict[str, tuple[float, ...]]:
    if channels not in (1, 3):
        reason = f"--data.args.channels {channels} is not 1 (grey) or 3 (colour)."
        raise ConfigError(reason, "--data.args.channels 3")
    defaults = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD} if channels == 3 else {"mean": HALF, "std": HALF}
    numbers = {"mean": mean or defaults["mean"], "std": std or defaults["std"]}
    for name, values in numbers.items():
        of_numbers = len(values) == channels and all(isinstance(n, (int, float)) for n in values)
        if not of_numbers or (name == "std" and min(values) <= 0):
            reason = f"--data.args.{name} {values} is not {channels} numbers, those of std above 0."
            raise ConfigError(reason, f"--data.args.{name} '{list(defaults[name])}'")
    return {name: tuple(map(float, values)) for name, values in numbers.items()}


def _images(root: Path) -> tuple[list[str], list[tuple[str, int]]]:
    """The classes, and the path and class of each image."""
    from fsdp.base.torch_private import import_torchvision

    import_torchvision()
    from torchvision.datasets import ImageFolder

    from fsdp.tokenize.rows import is_other, is_train

    def is_image(path: str) -> bool:
        hidden = any(part.startswith(".") for part in Path(path).relative_to(root).parts)
        return path.lower().endswith(SUFFIXES) and not hidden  # macOS writes ._NAME.jpg beside NAME.jpg

    class Images(ImageFolder):
        def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
            names, _ = super().find_classes(directory)
            visible = [name for name in names if not name.startswith(".")]
            return visible, {name: label for label, name in enumerate(visible)}

    try:
        images = Images(str(root), is_valid_file=is_image)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{root}: {message_line(error)}.", f"images in {quoted(root)}/CLASS/ ({', '.join(SUFFIXES)})"
        ) from None
    splits = {is_train(name) for name in images.classes if is_train(name) or is_other(name)}
    if len(splits) == 2:
        raise ConfigError(
            f"the folders of {root} are {', '.join(images.classes)}: splits, not classes.",
            f"move their images into {quoted(root)}/train and {quoted(root)}/val",
        )
    # In the order of a walk: a folder's own images before those of the folders in it.
    samples = sorted(images.samples, key=lambda image: (image[1], Path(image[0]).parent.parts, image[0]))
    return images.classes, samples


class ImageFiles:
    """Samples of one image file each, decoded by Pillow when a batch is read."""

    def __init__(self, images: Sequence[tuple[str, int]], preprocess: Mapping[str, Any]) -> None:
        self.paths = [path for path, _ in images]
        self.labels = np.array([label for _, label in images], np.int64)
        self._preprocess = preprocess

    def __len__(self) -> int:
        return len(self.paths)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        inputs = np.stack([self._read(self.paths[int(index)]) for index in indices])
        return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(self.labels[indices])}

    def _read(self, path: str) -> np.ndarray:
        from PIL import Image

        try:
            with Image.open(path) as image:
                return prepare(image, self._preprocess)
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders raise what they like
            raise OSError(f"{path}: {error}") from error


# ---------------------------------------------------------------- one image


def prepare(image: Image, preprocess: Mapping[str, Any]) -> np.ndarray:
    """Converts an image as in training: float32 [channels, size, size], of the middle square; through the
    source's size if that is smaller.
    """
    from PIL import Image as Pillow
    from PIL import ImageOps

    size, source = preprocess["image_size"], preprocess.get("source_size")
    plain = upright(image).convert("L" if preprocess["channels"] == 1 else "RGB")
    if source:
        plain = ImageOps.fit(plain, (source, source), Pillow.Resampling.BOX)
    pixels = np.asarray(ImageOps.fit(plain, (size, size), Pillow.Resampling.BILINEAR)).reshape(size, size, -1)
    table = normalise_table(255, preprocess["mean"], preprocess["std"])
    return np.stack([table[channel][pixels[..., channel]] for channel in range(pixels.shape[-1])])


def upright(image: Image) -> Image:
    """The image as it is shown: turned as its EXIF data say, with 8 bits for each of 16."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    turned = ImageOps.exif_transpose(image)
    # 16 bits are I;16, and I in a PGM or PPM file. convert() would clip each value at 255.
    if turned.mode.startswith("I;16") or (turned.mode == "I" and image.format == "PPM"):
        return Pillow.fromarray((np.asarray(turned) >> 8).astype(np.uint8))
    if turned.mode in ("I", "F"):
        extrema: Any = turned.getextrema()
        low, high = extrema
        if not (low >= 0 and high <= 255) or (turned.mode == "F" and 0 < high <= 1):
            raise ValueError(f"pixels of 32 bits from {low:g} to {high:g}, not 0 to 255: save 8 or 16 bits")
    return turned
