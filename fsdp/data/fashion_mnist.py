"""fashion_mnist: 60,000 and 10,000 images of clothes, 28×28, normalised to −1 … 1, in torchvision's layout.

The files are in DIR/FashionMNIST/raw (or DIR itself), plain or .gz; missing ones are downloaded once per
node. They are not read through torchvision, whose import takes longer than reading them.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import zlib
from pathlib import Path

import numpy as np

from fsdp.base.cache_folder import cache_folder
from fsdp.base.errors import ConfigError
from fsdp.base.regular_file import gzip_blocks
from fsdp.data.arguments import Where
from fsdp.data.download import DownloadError, download, fetch
from fsdp.data.images import PixelSamples
from fsdp.data.types import DataInfo, DataSet

MIRROR = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
# md5 of the .gz files as published: https://github.com/zalandoresearch/fashion-mnist
FILES = {
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
MEAN, STD = (0.5,), (0.5,)
SIZE = 28


def build(where: Where, *, mirror: str = "") -> DataSet:
    folder = _obtain(Path(where.dir) if where.dir else cache_folder(), mirror)
    info = DataInfo(
        kind="images",
        facts={"num_classes": len(CLASSES), "image_size": SIZE, "channels": 1},
        class_names=CLASSES,
        default_epochs=5,
        preprocess={"image_size": SIZE, "channels": 1, "mean": MEAN, "std": STD},
    )
    return DataSet(train=_samples(folder, "train"), heldout=_samples(folder, "t10k"), info=info)


# ---------------------------------------------------------------- having the files


def _obtain(base: Path, mirror: str) -> Path:
    """Returns the folder of the four files; downloads them to torchvision's place if there is none."""
    raw = base / "FashionMNIST" / "raw"
    for folder in (raw, base):
        if not _missing(folder):
            return folder
    source = (mirror or MIRROR).rstrip("/") + "/"
    try:
        # The published checksums apply to the published files: a user's mirror may hold others.
        fetch(raw, functools.partial(_missing, raw), functools.partial(_get, source, check_sums=not mirror))
    except (DownloadError, OSError) as error:
        raise ConfigError(
            f"FashionMNIST is not in {raw} and cannot be downloaded: {error}.",
            f"copy {', '.join(f'{name}.gz' for name in FILES)} to FOLDER/FashionMNIST/raw and give "
            "--data.dir FOLDER",
        ) from error
    return raw


def _missing(folder: Path) -> list[str]:
    return [name for name in FILES if not (folder / name).is_file() and not (folder / f"{name}.gz").is_file()]


def _get(source: str, name: str, work: Path, *, check_sums: bool) -> Path:
    """Downloads, checks and unpacks one file in the work folder."""
    packed, plain = work / f"{name}.gz", work / name
    download(f"{source}{name}.gz", packed)
    if check_sums and hashlib.md5(packed.read_bytes(), usedforsecurity=False).hexdigest() != FILES[name]:
        raise DownloadError(f"{source}{name}.gz is not the published file (md5 differs)")
    try:
        with plain.open("wb") as out:
            out.writelines(gzip_blocks(packed))
        read_idx(plain)
    except (OSError, EOFError, zlib.error, ConfigError) as error:
        raise DownloadError(f"{source}{name}.gz is not complete ({error})") from error
    return plain


# ---------------------------------------------------------------- reading them


def _samples(folder: Path, split: str) -> PixelSamples:
    images, labels = (
        read_idx(_present(folder, f"{split}-{name}")) for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    if (
        images.ndim != 3
        or images.shape[1:] != (SIZE, SIZE)
        or labels.shape != images.shape[:1]
        or labels.max() >= len(CLASSES)
    ):
        raise ConfigError(
            f"{folder}: {split} holds images {list(images.shape)} and labels {list(labels.shape)}, not "
            "FashionMNIST.",
            "give the FashionMNIST folder as --data.dir",
        )
    return PixelSamples(images[:, None], labels.astype(np.int64), 255, MEAN, STD)


def _present(folder: Path, name: str) -> Path:
    return folder / name if (folder / name).is_file() else folder / f"{name}.gz"


def read_idx(path: Path) -> np.ndarray:
    """Reads a file of the idx format, bytes only: two zeros, 8 (unsigned byte), the number of axes, their
    sizes, the values.
    """
    try:
        if path.suffix == ".gz":
            content = np.frombuffer(b"".join(gzip_blocks(path)), np.uint8)
        else:
            content = np.memmap(path, np.uint8, "r")  # ranks of a node share its pages
        zeros, kind, axes = struct.unpack(">HBB", content[:4].tobytes())
        if zeros or kind != 8 or not 1 <= axes <= 4:
            raise ValueError("no idx header")
        shape = struct.unpack(f">{axes}I", content[4 : 4 + 4 * axes].tobytes())
        return np.asarray(content[4 + 4 * axes :]).reshape(shape)
    except (OSError, EOFError, ValueError, zlib.error, struct.error) as error:
        raise ConfigError(
            f"{path} is not a complete idx file: {error}.", f"rm {path} and start again to download it"
        ) from error
