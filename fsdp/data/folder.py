"""folder: images in one folder per class, as torchvision's ImageFolder: DIR/train/CLASS/…, DIR/val/CLASS/….

Without a train folder, the images are in DIR/CLASS/…, and the middle one of each ten of a class is held out.
Pillow decodes an image when its batch is read. Not here: converting an image to a tensor
(fsdp/data/images.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp.base.errors import ConfigError
from fsdp.data.arguments import Where, check_range
from fsdp.data.images import every_tenth, prepare
from fsdp.data.types import DataInfo, DataSet

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def build(
    where: Where,
    *,
    image_size: int = 224,
    channels: int = 3,
    mean: list | None = None,
    std: list | None = None,
) -> DataSet:
    check_range("image_size", image_size, 1)
    preprocess = {"image_size": image_size, "channels": channels, **_normalisation(channels, mean, std)}
    root = _root(where.dir)
    train_root, val_root = (root / "train", root / "val") if (root / "train").is_dir() else (root, None)
    classes = _classes(train_root)
    paths, labels = _find(train_root, classes)
    if val_root is not None and val_root.is_dir():
        _check_same_classes(val_root, classes)
        held_paths, held_labels = _find(val_root, classes)
    else:
        held = every_tenth(labels)
        held_paths, held_labels = [p for p, h in zip(paths, held, strict=True) if h], labels[held]
        paths, labels = [p for p, h in zip(paths, held, strict=True) if not h], labels[~held]
    info = DataInfo(
        kind="images",
        facts={"num_classes": len(classes), "image_size": image_size, "channels": channels},
        class_names=tuple(classes),
        default_epochs=10,
        preprocess=preprocess,
    )
    heldout = ImageFiles(held_paths, held_labels, preprocess) if held_paths else None
    return DataSet(train=ImageFiles(paths, labels, preprocess), heldout=heldout, info=info)


def _normalisation(channels: int, mean: list | None, std: list | None) -> dict[str, tuple[float, ...]]:
    if channels not in (1, 3):
        raise ConfigError(
            f"--data.args.channels {channels} is not 1 (grey) or 3 (colour).", "--data.args.channels 3"
        )
    defaults = (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ([0.5], [0.5])
    found = {}
    for name, given, default in zip(("mean", "std"), (mean, std), defaults, strict=True):
        values = default if given is None else given
        numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
        if len(values) != channels or not numbers or (name == "std" and min(values) <= 0):
            what = f"{channels} number{'s' * (channels > 1)}" + " above 0" * (name == "std")
            raise ConfigError(
                f"--data.args.{name} {values} is not {what}.", f"--data.args.{name} '{default}'"
            )
        found[name] = tuple(map(float, values))
    return found


def _root(folder: str) -> Path:
    hint = "--data.dir FOLDER with FOLDER/CLASS/image.png, or FOLDER/train and FOLDER/val of those"
    if not folder:
        raise ConfigError("--data.name folder needs a folder of images in --data.dir.", hint)
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ConfigError(f"--data.dir {folder} is not a folder.", hint)
    return root


def _classes(root: Path) -> list[str]:
    classes = sorted(
        entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith(".")
    )
    if not classes:
        raise ConfigError(f"{root} has no folder per class.", f"put images into {root}/CLASS/")
    return classes


def _check_same_classes(root: Path, classes: list[str]) -> None:
    if unknown := [name for name in _classes(root) if name not in classes]:
        raise ConfigError(
            f"{root} has class {unknown[0]}, which train does not have.",
            f"add {unknown[0]} to train, or remove it",
        )


def _find(root: Path, classes: list[str]) -> tuple[list[str], np.ndarray]:
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = list(_pictures(str(root / name)))
        if not found and (root / name).is_dir():
            raise ConfigError(
                f"{root / name} has no image in it ({', '.join(SUFFIXES)}).", f"rmdir {root / name}"
            )
        paths += found
        labels += [label] * len(found)
    return paths, np.asarray(labels, np.int64)


def _pictures(folder: str) -> Iterator[str]:
    for current, names, files in os.walk(folder, followlinks=True):
        names.sort()
        yield from (f"{current}/{name}" for name in sorted(files) if name.lower().endswith(SUFFIXES))


class ImageFiles:
    """Samples of one image file each."""

    def __init__(self, paths: list[str], labels: np.ndarray, preprocess: Mapping[str, Any]) -> None:
        self.paths, self.labels, self.preprocess = paths, labels, preprocess

    def __len__(self) -> int:
        return len(self.paths)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        inputs = np.stack([self._read(self.paths[index]) for index in indices])
        return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(self.labels[indices])}

    def _read(self, path: str) -> np.ndarray:
        from PIL import Image

        try:
            with Image.open(path) as image:
                return prepare(image, self.preprocess)
        except (OSError, ValueError, SyntaxError) as error:  # what Pillow's decoders raise on a broken file
            raise OSError(f"{path}: {error}") from error
