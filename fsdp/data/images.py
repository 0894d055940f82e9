"""Images as samples: integer pixels in memory, normalised by table; and one image converted to a tensor.

prepare() converts an image as in training; folder.py and fsdp/predict/images.py call it. Not here: files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image


def normalise_table(steps: int, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Returns [channels, steps + 1], the normalised pixel values: the same bits as ToTensor and Normalize in
    fp32.
    """
    values = np.arange(steps + 1, dtype=np.float32) / np.float32(steps)
    return np.stack([(values - np.float32(m)) / np.float32(s) for m, s in zip(mean, std, strict=True)])


class PixelSamples:
    """Images [n, channels, height, width] of whole numbers 0 … steps, with labels."""

    def __init__(
        self, pixels: np.ndarray, labels: np.ndarray, steps: int, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        assert len(pixels) == len(labels)
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


def every_tenth(labels: np.ndarray) -> np.ndarray:
    """Returns a mask of the middle one of each ten of a class: a fixed tenth, independent of the seed."""
    held = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        held[np.flatnonzero(labels == label)[4::10]] = True
    return held


def prepare(image: Image, preprocess: Mapping[str, Any]) -> np.ndarray:
    """Converts an image as in training: float32 [channels, size, size]."""
    pixels = to_pixels(image, preprocess)
    table = normalise_table(255, preprocess["mean"], preprocess["std"])
    return np.stack([table[c][pixels[..., c]] for c in range(pixels.shape[-1])])


def to_pixels(image: Image, preprocess: Mapping[str, Any]) -> np.ndarray:
    """Returns uint8 [size, size, channels]: the middle square, scaled; through the source's size if that is
    smaller.
    """
    from PIL import Image as Pillow
    from PIL import ImageOps

    size, source = preprocess["image_size"], preprocess.get("source_size")
    plain = upright(image).convert("L" if preprocess["channels"] == 1 else "RGB")
    if source:
        plain = ImageOps.fit(plain, (source, source), Pillow.Resampling.BOX)
    scaled = ImageOps.fit(plain, (size, size), Pillow.Resampling.BILINEAR)
    return np.asarray(scaled).reshape(size, size, -1)


def upright(image: Image) -> Image:
    """The image as it is shown: turned as its EXIF data say, with 8 bits for each of 16."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    turned = ImageOps.exif_transpose(image)
    # 16 bits are I;16, and I in a PGM or PPM file. convert() would clip each value at 255.
    if turned.mode.startswith("I;16") or (turned.mode == "I" and image.format == "PPM"):
        return Pillow.fromarray((np.asarray(turned) >> 8).astype(np.uint8))
    if turned.mode in ("I", "F"):
        _check_range(turned)
    return turned


def _check_range(image: Image) -> None:
    """Raises ValueError for pixels of 32 bits beyond 0 to 255: nothing states which value is white."""
    found: Any = image.getextrema()
    low, high = found
    if not (low >= 0 and high <= 255) or (image.mode == "F" and 0 < high <= 1):
        raise ValueError(
            f"its pixels have 32 bits and are from {low:g} to {high:g}, not from 0 to 255: save it with 8 or "
            "16 bits"
        )


def to_picture(inputs: np.ndarray, preprocess: Mapping[str, Any]) -> np.ndarray:
    """Converts a tensor back to an image for display: uint8 [height, width, channels]."""
    shape = (-1, 1, 1)
    mean, std = (np.asarray(preprocess[name], np.float32).reshape(shape) for name in ("mean", "std"))
    return np.rint(np.clip((inputs * std + mean) * 255, 0, 255)).astype(np.uint8).transpose(1, 2, 0)
