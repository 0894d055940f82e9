"""folder: images in one folder per class, as torchvision's ImageFolder: DIR/train/CLASS/…, DIR/val/CLASS/….

Without a train folder, the images are in DIR/CLASS/…, and the middle one of each ten of a class is held out.
Pillow decodes an image when its batch is read. Not here: converting an image to a tensor
(fsdp/data/images.py).
"""

from __future__ import annotations

import hashlib
import logging
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp.base.commands import quoted
from fsdp.base.errors import ConfigError
from fsdp.base.text import listed
from fsdp.data.arguments import Where, check_range
from fsdp.data.images import every_tenth, prepare
from fsdp.data.types import DataInfo, DataSet
from fsdp.tokenize.file_names import shown
from fsdp.tokenize.sources import ROWS, SETTINGS, ends_with
from fsdp.tokenize.split_names import are_splits, is_numbered_train, is_other, is_train, validation_of

log = logging.getLogger(__name__)
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
OTHER_PICTURES = (".gif", ".heic", ".heif", ".avif", ".jfif", ".jpe", ".jp2", ".jxl", ".tga", ".svg")
"""Left out, as by torchvision's ImageFolder, with a warning."""
TABLES = (".csv", ".tsv", *ROWS)
Part = tuple[Sequence[str], np.ndarray]
"""Paths, and their labels."""
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
    _warn_of_tables(root)
    if val_root is not None:
        _warn_of_parts(root)
    if val_root is not None and val_root.is_dir():
        _check_same_classes(val_root, classes)
    else:
        if val_root is not None:
            _warn_of_splits(root)
        val_root = None
    _check_classes(train_root, classes)
    if len(classes) == 1:
        log.warning(
            "folder: %s has one class, %s: the cross entropy of each image is 0. HINT: a folder per class "
            "below --data.dir",
            train_root,
            classes[0],
        )
    train, held, fingerprint = _listed(train_root, val_root, classes)
    facts = {"num_classes": len(classes), "image_size": image_size, "channels": channels}
    info = DataInfo(
        kind="images",
        facts={**facts, "fingerprint": fingerprint},
        class_names=tuple(classes),
        default_epochs=10,
        preprocess=preprocess,
    )
    heldout = ImageFiles(*held, preprocess) if len(held[0]) else None
    return DataSet(train=ImageFiles(*train, preprocess), heldout=heldout, info=info)


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
    root = Path(folder)
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


def _check_classes(root: Path, classes: list[str]) -> None:
    if are_splits(classes):
        raise ConfigError(
            f"the folders of {root} are {', '.join(classes)}: splits, not classes.",
            _renamed(root, classes),
        )
    by_text: dict[str, str] = {}
    for name in classes:
        other = by_text.setdefault(unicodedata.normalize("NFC", name), name)
        if other is not name:
            log.warning(
                "folder: %s has two classes of one name, %a and %a, in two forms of Unicode. HINT: move the "
                "images of one into the other",
                root,
                other,
                name,
            )


def _renamed(root: Path, splits: list[str]) -> str:
    """What makes DIR/train and DIR/val of folders with other names of splits."""
    if "train" in splits:
        return f"--data.name folder --data.dir {quoted(root)}"
    trains, val = list(filter(is_train, splits)), validation_of(filter(is_other, splits))
    moves = [(trains[0], "train")] if len(trains) == 1 else []
    moves += [(val, "val")] if val != "val" else []
    words = [f"mv {quoted(root / old)} {quoted(root / new)}" for old, new in moves]
    return "; ".join([*([] if len(trains) == 1 else [_joined(root, trains)]), *words])


def _joined(root: Path, parts: Iterable[str]) -> str:
    """A command that moves the images of several folders into train, those of each into a folder of its own
    within their class: two may have images of one name.
    """
    classes = " ".join(f"{quoted(part)}/*/" for part in parts)
    move = 'mkdir -p "train/${c#*/}" && mv "$c" "train/${c#*/}${c%%/*}"'
    return f"(cd {quoted(root)} && for c in {classes}; do {move}; done)"


def _warn_of_parts(root: Path) -> None:
    """Further folders to train on are not read."""
    named = sorted(
        entry.name for entry in os.scandir(root) if entry.is_dir() and is_numbered_train(entry.name)
    )
    parts = [name for name in named if any((root / name).glob("[!.]*/"))]
    if parts:
        log.warning(
            "folder: %s has train, and %s is not read. HINT: %s moves its images into train",
            shown(root),
            " and ".join(parts),
            _joined(root, parts),
        )


def _warn_of_tables(root: Path) -> None:
    """They may have other labels than the folders, or splits, as train_and_val.csv has."""
    files = sorted(entry.name for entry in os.scandir(root) if entry.is_file())
    tables = [shown(name) for name in files if ends_with(name, TABLES) and name not in SETTINGS]
    if tables := [name for name in tables if not name.startswith(".")]:
        log.warning(
            "folder: %s of %s is not read: the classes are the folders. HINT: --data.name mine:build reads "
            "labels or splits of a file, with a Dataset of your own",
            listed(tables),
            shown(root),
        )


def _warn_of_splits(root: Path) -> None:
    """train has no val beside it, and the folder of another split is not read."""
    others = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and is_other(entry.name))
    if others:
        log.warning(
            "folder: %s has no val: a tenth of train is held out, and %s is not read. HINT: ln -s %s %s "
            "reads it as held-out images",
            root,
            " and ".join(others),
            quoted(validation_of(others)),
            quoted(root / "val"),
        )


def _check_same_classes(root: Path, classes: list[str]) -> None:
    if unknown := [name for name in _classes(root) if name not in classes]:
        text = unicodedata.normalize("NFC", unknown[0])
        if same := next((name for name in classes if unicodedata.normalize("NFC", name) == text), ""):
            raise ConfigError(
                f"{root} has class {unknown[0]!a}, which train has as {same!a}, in another form of Unicode.",
                f"mv {quoted(root / unknown[0])} {quoted(root / same)}",
            )
        raise ConfigError(
            f"{root} has class {unknown[0]}, which train does not have.",
            f"add {unknown[0]} to train, or remove it",
        )


def _check_no_loop(folder: str, name: str) -> None:
    """Links to folders are followed; one to a folder above would give its images again and again."""
    path = Path(folder, name)
    if path.is_symlink() and path.resolve() in (above := Path(folder).resolve(), *above.parents):
        raise ConfigError(
            f"{shown(path)} is a link to {shown(path.resolve())}, a folder above it.",
            f"rm {quoted(path)}",
        )


def _is_picture(name: str) -> bool:
    """Hidden files are none: macOS writes ._NAME.jpg beside NAME.jpg."""
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _listed(root: Path, val_root: Path | None, classes: list[str]) -> tuple[Part, Part, str]:
    """Training and held-out images, and the fingerprint of the first: their names and classes."""
    images = list(_find(root, classes))
    if val_root is not None:
        base, train, held = root.parent, images, list(_find(val_root, classes))
    else:
        held_out = every_tenth(np.array([label for _, label in images], np.int64)).tolist()
        base, train = root, [image for image, is_held in zip(images, held_out, strict=True) if not is_held]
        held = [image for image, is_held in zip(images, held_out, strict=True) if is_held]
    cut = len(str(base)) + 1
    lines = b"".join(b"%d %s\n" % (label, os.fsencode(path[cut:])) for path, label in train)
    return _part(train), _part(held), hashlib.sha256(lines).hexdigest()[:16]


def _part(images: Sequence[tuple[str, int]]) -> Part:
    return [path for path, _ in images], np.array([label for _, label in images], np.int64)


def _find(root: Path, classes: list[str]) -> Iterator[tuple[str, int]]:
    """The path of each image, and its class."""
    others: Counter[str] = Counter()
    for label, name in enumerate(classes):
        empty = True
        for path in _pictures(str(root / name), others):
            empty = False
            yield path, label
        if empty and (root / name).is_dir():
            raise ConfigError(
                f"{root / name} has no image in it ({', '.join(SUFFIXES)}).",
                f"mv {quoted(root / name)} {quoted(root / f'.{name}')}: hidden folders are left out",
            )
    if others:
        log.warning(
            "folder: %s files below %s are left out. HINT: save them as .png; %s are read",
            listed([f"{count:,} {suffix}" for suffix, count in sorted(others.items())]),
            shown(root),
            ", ".join(SUFFIXES),
        )


def _pictures(folder: str, others: Counter[str]) -> Iterator[str]:
    """The paths of the images; `others` counts those of formats that are not read."""
    for current, names, files in os.walk(folder, followlinks=True):
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in names:
            _check_no_loop(current, name)
        yield from (f"{current}/{name}" for name in sorted(files) if _is_picture(name))
        visible = (name.lower() for name in files if not name.startswith("."))
        others.update(suffix for name in visible if (suffix := Path(name).suffix) in OTHER_PICTURES)


class ImageFiles:
    """Samples of one image file each."""

    def __init__(self, paths: Sequence[str], labels: np.ndarray, preprocess: Mapping[str, Any]) -> None:
        self.paths, self.labels, self.preprocess = paths, labels, preprocess

    def __len__(self) -> int:
        return len(self.paths)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        inputs = np.stack([self._read(self.paths[int(index)]) for index in indices])
        labels = self.labels[indices].astype(np.int64)
        return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(labels)}

    def _read(self, path: str) -> np.ndarray:
        from PIL import Image

        try:
            with Image.open(path) as image:
                return prepare(image, self.preprocess)
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders raise what they like
            raise OSError(f"{path}: {error}") from error
