"""Data sets of images: digits, fashion_mnist, folder and synthetic; and one image converted to a tensor.

    digits          1,797 real handwritten digits, stored beside this file and scaled to 28×28
                    (digits.LICENSE.md); the default. Their writers also wrote training digits: the held-out
                    accuracy does not measure reading the hand of a new writer.
    fashion_mnist   60,000 and 10,000 images of clothes, by torchvision, downloaded once per node
    folder          DIR/CLASS/…, or DIR/train/CLASS/… and DIR/val/CLASS/…, by torchvision's ImageFolder
    synthetic       random images or tokens, for measurements, of which a model can only memorise the labels

Without held-out images of its own, the middle one of each ten of a class is held out, for every seed. A
synthetic sample is a slice of one table of noise, at a position derived from its index: producing one costs a
copy. prepare() converts an image as in training; fsdp/predict calls it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from fsdp.base.errors import ConfigError, message_line
from fsdp.base.proc import cache_folder
from fsdp.base.text import quoted
from fsdp.base.torch_private import import_torchvision
from fsdp.data.types import DataInfo, DataSet, Where, check_range, mix, shifted, stream_key

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""As torchvision's ImageFolder reads them."""
DIGITS = Path(__file__).with_name("digits.npz")
SIZE, DIGIT_SIZE, INK, TOTAL = 28, 8, 16, 14
HALF = (0.5,)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NOISE_OFFSETS = 1 << 16
"""Different slices of the noise."""
NOISE_SIZES = {"image_size": SIZE, "channels": 1, "num_classes": 10}


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
    facts, names = {"num_classes": len(class_names), **sizes}, tuple(class_names)
    preprocess = {**sizes, "mean": HALF, "std": HALF, **more}
    return DataInfo(
        kind="images", facts=facts, class_names=names, default_epochs=epochs, preprocess=preprocess
    )


def digits(where: Where) -> DataSet:
    where.refuse_dir("digits")
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


def fashion_mnist(where: Where) -> DataSet:
    """The files are in DIR/FashionMNIST/raw, as torchvision leaves them."""
    from fsdp.tokenize.rows import locked

    import_torchvision()
    from torchvision.datasets import FashionMNIST

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
    """
    image_size: height and width of a sample, in pixels
    channels: 3 (colour) or 1 (grey)
    mean: of each channel; empty: ImageNet's
    std: of each channel; empty: ImageNet's
    """
    from fsdp.tokenize.rows import held_out_line, is_other, is_train

    check_range("image_size", image_size, 1)
    root = Path(where.dir or ".")
    if not where.dir or not root.is_dir():
        raise ConfigError(
            f"--data.name folder needs a folder of images in --data.dir, not {where.dir or 'none'}.",
            "--data.dir FOLDER with FOLDER/CLASS/image.png, or FOLDER/train and FOLDER/val of those",
        )
    means, stds = (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else (HALF, HALF)
    sizes: dict[str, Any] = {"image_size": image_size, "channels": channels}
    preprocess = {**sizes, "mean": tuple(mean or means), "std": tuple(std or stds)}
    if channels not in (1, 3) or not len(preprocess["mean"]) == len(preprocess["std"]) == channels:
        reason = f"channels {channels}, mean {preprocess['mean']} and std {preprocess['std']} do not agree."
        n = 1 if channels == 1 else 3
        half = f"'{[0.5] * n}'"
        hint = f"--data.args.channels {n} --data.args.mean {half} --data.args.std {half}"
        raise ConfigError(f"--data.args: {reason}", hint)
    names = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
    train, others = next(filter(is_train, names), ""), list(filter(is_other, names))
    train = train if others or train == "train" else ""  # a class
    classes, images = _images(root / train)
    if train and others:
        log.info("folder: %s", held_out_line([str(root / others[-1])]))
        held_names, held = _images(root / others[-1])
        if unknown := [name for name in held_names if name not in classes]:
            reason = f"{root / others[-1]} has class {unknown[0]}, which {train} does not have."
            raise ConfigError(reason, f"add {unknown[0]} to {train}, or remove it")
        held = [(path, classes.index(held_names[label])) for path, label in held]
    else:
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


def _images(root: Path) -> tuple[list[str], list[tuple[str, int]]]:
    """The classes, and the path and class of each image."""
    import_torchvision()
    from torchvision.datasets.folder import find_classes, make_dataset

    def is_image(path: str) -> bool:
        hidden = any(part.startswith(".") for part in Path(path).relative_to(root).parts)
        return path.lower().endswith(SUFFIXES) and not hidden  # macOS writes ._NAME.jpg beside NAME.jpg

    try:
        classes = [name for name in find_classes(str(root))[0] if not name.startswith(".")]
        labels = {name: label for label, name in enumerate(classes)}
        images = make_dataset(str(root), labels, is_valid_file=is_image)
    except FileNotFoundError as error:
        hint = f"images in {quoted(root)}/CLASS/ ({', '.join(SUFFIXES)})"
        raise ConfigError(f"{root}: {message_line(error)}.", hint) from None
    # In the order of a walk: a folder's own images before those of the folders in it.
    return classes, sorted(images, key=lambda image: (image[1], Path(image[0]).parent.parts, image[0]))


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
    """The image as it is shown: turned as its EXIF data say. Its values have 8 bits."""
    from PIL import ImageOps

    if image.mode[0] in "IF":  # convert() would clip each value at 255
        raise ValueError(f"pixels of mode {image.mode}, not of 8 bits: save 8 bits")
    return ImageOps.exif_transpose(image)


# ---------------------------------------------------------------- synthetic


def synthetic(
    where: Where,
    *,
    kind: Literal["auto", "images", "tokens"] = "auto",
    samples: int = 100_000,
    heldout: int = 1000,
    image_size: int = 0,
    channels: int = 0,
    num_classes: int = 0,
    vocab_size: int = 0,
) -> DataSet:
    """Sizes that are not given are the model's.

    kind: images or tokens; auto: what the model reads
    samples: number of samples to train on
    heldout: number of held-out samples
    image_size: height and width of an image; 0: the model's
    channels: of an image; 0: the model's
    num_classes: of images; 0: the model's
    vocab_size: of tokens; 0: the model's
    """
    where.refuse_dir("synthetic")
    sizes = {"image_size": image_size, "channels": channels, "num_classes": num_classes}
    sizes["vocab_size"] = vocab_size
    check_range("samples", samples, 1)
    for name, value in {**sizes, "heldout": heldout}.items():
        check_range(name, value, 0)
    if kind == "auto":
        kind = "tokens" if vocab_size or "vocab_size" in where.model_facts else "images"
    known = {name: value or where.model_facts.get(name, 0) for name, value in sizes.items()}
    known = {name: value for name, value in known.items() if value}
    if wrong := [name for name in known if (name == "vocab_size") != (kind == "tokens")]:
        other = "tokens" if kind == "images" else "images"
        raise ConfigError(
            f"--data.args.{wrong[0]} {known[wrong[0]]} has no effect on {kind}.", f"--data.args.kind {other}"
        )
    if kind == "tokens":
        facts = {"vocab_size": 256, "seq_len": where.seq_len, **known}
        info = DataInfo(
            kind="text", facts=facts, default_steps=20, tokens_per_sample=where.seq_len, masks_targets=False
        )
    else:
        facts = {**NOISE_SIZES, **known}
        half = (0.5,) * facts["channels"]
        preprocess = {
            "image_size": facts["image_size"],
            "channels": facts["channels"],
            "mean": half,
            "std": half,
        }
        names = tuple(f"class {n}" for n in range(facts["num_classes"]))
        info = DataInfo(
            kind="images", facts=facts, default_steps=20, class_names=names, preprocess=preprocess
        )
    train, held = (Noise(facts, name, count) for name, count in (("train", samples), ("heldout", heldout)))
    return DataSet(train=train, heldout=held if heldout else None, info=info)


class Noise:
    """Images if `facts` have their size, else tokens."""

    def __init__(self, facts: dict[str, int], name: str, count: int) -> None:
        self.count, self._classes = count, facts.get("num_classes")
        self._offset_key, self._label_key = stream_key(name, "place"), stream_key(name, "label")
        generator = np.random.Generator(np.random.Philox(key=stream_key("synthetic")))
        self._shape: tuple[int, ...]
        self._noise: np.ndarray
        if self._classes is None:
            self._shape = (facts["seq_len"] + 1,)
            self._noise = generator.integers(0, facts["vocab_size"], facts["seq_len"] + 1 + NOISE_OFFSETS)
        else:
            self._shape = facts["channels"], facts["image_size"], facts["image_size"]
            count = int(np.prod(self._shape)) + NOISE_OFFSETS
            self._noise = generator.standard_normal(count, dtype=np.float32)

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        numbers = indices.astype(np.uint64)
        slices = np.empty((len(indices), *self._shape), self._noise.dtype)
        offsets = (mix(numbers, self._offset_key) % np.uint64(NOISE_OFFSETS)).astype(np.int64)
        for out, offset in zip(slices, offsets, strict=True):
            out.reshape(-1)[:] = self._noise[offset : offset + out.size]
        if self._classes is None:
            return shifted(slices)
        labels = mix(numbers, self._label_key) % np.uint64(self._classes)
        return {"inputs": torch.from_numpy(slices), "targets": torch.from_numpy(labels.astype(np.int64))}
