"""A grid of images with predicted classes: green if correct, red if wrong. Not here: predictions."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fsdp.base.errors import ConfigError
from fsdp.data.images import to_picture
from fsdp.predict.images import Prediction

if TYPE_CHECKING:
    from PIL.Image import Image

TILE, LINE, MARGIN = 112, 14, 10
PAPER, INK, RIGHT, WRONG = (255, 255, 255), (40, 40, 40), (20, 120, 40), (190, 30, 30)


def draw(predictions: Sequence[Prediction], classes: Sequence[str], preprocess: Mapping[str, Any]) -> Image:
    from PIL import Image, ImageDraw

    columns = min(len(predictions), max(4, math.isqrt(len(predictions))))
    rows = -(-len(predictions) // columns)
    width, height = TILE + MARGIN, TILE + 2 * LINE + MARGIN
    sheet = Image.new("RGB", (columns * width + MARGIN, rows * height + MARGIN), PAPER)
    pen = ImageDraw.Draw(sheet)
    for place, one in enumerate(predictions):
        x, y = MARGIN + place % columns * width, MARGIN + place // columns * height
        sheet.paste(_tile(one.inputs, preprocess), (x, y))
        colour = INK if one.truth is None else RIGHT if one.truth == one.best else WRONG
        pen.text(
            (x, y + TILE + 1), _fit(f"{classes[one.best]} {float(one.probabilities.max()):.0%}"), fill=colour
        )
        pen.text(
            (x, y + TILE + LINE),
            _fit(one.name if one.truth is None else f"is {classes[one.truth]}"),
            fill=INK,
        )
    return sheet


def _tile(inputs: np.ndarray, preprocess: Mapping[str, Any]) -> Image:
    from PIL import Image

    pixels = pixels_of(inputs, preprocess)
    if pixels.shape[-1] != 3:
        pixels = np.repeat(pixels[..., :1], 3, axis=-1)
    return Image.fromarray(pixels).resize((TILE, TILE), Image.Resampling.NEAREST)


def pixels_of(inputs: np.ndarray, preprocess: Mapping[str, Any]) -> np.ndarray:
    """height × width × channels, 0 to 255, of a model's input."""
    return to_picture(inputs, preprocess) if "mean" in preprocess else _stretched(inputs)


def _stretched(inputs: np.ndarray) -> np.ndarray:
    """Without known preprocessing: the smallest value is black, the largest white."""
    low, high = float(inputs.min()), float(inputs.max())
    return np.rint((inputs - low) / max(high - low, 1e-12) * 255).astype(np.uint8).transpose(1, 2, 0)


def _fit(text: str) -> str:
    """ASCII, which Pillow's built-in font has, cut to the width of a tile."""
    plain = text.encode("ascii", "replace").decode()
    return plain if len(plain) <= 18 else plain[:16] + ".."


def check_name(file: Path) -> None:
    """Checks the file name before the predictions are computed."""
    from PIL import Image

    if file.suffix.lower() not in Image.registered_extensions():
        raise ConfigError(f"--out {file} has no image file extension.", f"--out {file.with_suffix('.png')}")


def save(sheet: Image, file: Path, *, replace: bool) -> None:
    """`replace`: a link at `file` is replaced, not followed.

    Not rundir/atomic_write.py: Pillow writes the file itself, and takes its format from the name.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        into = file.with_name(f".{secrets.token_hex(4)}.{file.name}") if replace else file
        try:
            sheet.save(into)
            into.replace(file)
        finally:
            if replace:
                into.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {file} cannot be written ({error.strerror}).", "--out predictions.png"
        ) from None
