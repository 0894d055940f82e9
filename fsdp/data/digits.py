"""digits: 1,797 real handwritten digits, stored beside this file and scaled to 28×28.

Source and licence: digits.LICENSE.md. The middle one of each ten of a class is held out: 179 of 1,797, the
same for every seed. The writers of the held-out digits also wrote training digits, so the held-out accuracy
does not measure reading the hand of a new writer.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fsdp.base.errors import ConfigError
from fsdp.data.arguments import Where
from fsdp.data.images import PixelSamples, every_tenth
from fsdp.data.types import DataInfo, DataSet

FILE = Path(__file__).with_name("digits.npz")
SIZE, SOURCE_SIZE, INK = 28, 8, 16
MEAN, STD = (0.5,), (0.5,)


def build(where: Where) -> DataSet:
    if where.dir:
        raise ConfigError(
            f"--data.dir {where.dir} has no effect on digits: they are part of this package.", "leave it out"
        )
    with np.load(FILE, allow_pickle=False) as file:
        images, labels = file["images"], file["labels"].astype(np.int64)
    pixels = draw(images)[:, None]
    held = every_tenth(labels)
    info = DataInfo(
        kind="images",
        facts={"num_classes": 10, "image_size": SIZE, "channels": 1},
        class_names=tuple("0123456789"),
        default_epochs=20,
        preprocess={"image_size": SIZE, "channels": 1, "mean": MEAN, "std": STD, "source_size": SOURCE_SIZE},
    )
    steps = brightness_steps()
    return DataSet(
        train=PixelSamples(pixels[~held], labels[~held], steps, MEAN, STD),
        heldout=PixelSamples(pixels[held], labels[held], steps, MEAN, STD),
        info=info,
    )


def draw(images: np.ndarray) -> np.ndarray:
    """Scales [n, 8, 8] of 0…16 to [n, 28, 28], bilinear, in whole numbers exact in fp32: the same bits on
    every processor.
    """
    weights, _ = _weights()
    return (weights @ images.astype(np.float32) @ weights.T).astype(np.int16)


def _weights() -> tuple[np.ndarray, int]:
    """Rows of 8 weights that sum to `total`: output pixel i samples the source at (4i − 5) / 14 (half-pixel
    centres).
    """
    total = 14
    place = np.clip(4 * np.arange(SIZE) - 5, 0, (SOURCE_SIZE - 1) * total)
    low, part = np.divmod(place, total)
    weights = np.zeros((SIZE, SOURCE_SIZE), dtype=np.float32)
    weights[np.arange(SIZE), low] += total - part
    weights[np.arange(SIZE), np.minimum(low + 1, SOURCE_SIZE - 1)] += part
    return weights, total


def brightness_steps() -> int:
    """The largest value that draw() returns: full ink times the weights of both directions."""
    return INK * _weights()[1] ** 2
