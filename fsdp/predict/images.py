"""Predicted classes of samples and of image files, the accuracy, and a grid of the images with their classes.

Preprocessing is that of training: it comes from the data's DataInfo.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fsdp.base.errors import ConfigError, message_line
from fsdp.data import Samples, heldout_batches
from fsdp.data.images import prepare, to_picture, upright
from fsdp.dist.mesh import DataRank
from fsdp.predict.trained import TrainedModel
from fsdp.rundir.paths import replace_with

if TYPE_CHECKING:
    from PIL.Image import Image

BATCH = 64
TILE, LINE, MARGIN = 112, 14, 10
TEXT_WIDTH = 18
PAPER, INK, RIGHT, WRONG = (255, 255, 255), (40, 40, 40), (20, 120, 40), (190, 30, 30)


@dataclass(frozen=True)
class Prediction:
    """Class probabilities of one image; truth is None if it is unknown."""

    name: str
    inputs: np.ndarray
    probabilities: Tensor
    truth: int | None

    @property
    def best(self) -> int:
        return int(self.probabilities.argmax())

    def line(self, classes: Sequence[str]) -> str:
        top = self.probabilities.topk(min(3, len(self.probabilities)))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        likely = "  ".join(f"{classes[number]} {share:.1%}" for number, share in pairs)
        truth = "" if self.truth is None else f"is {classes[self.truth]:<12}  "
        return f"{self.name:<14}  {truth}{likely}{'' if self.truth in (None, self.best) else '  WRONG'}"


def classes_of(trained: TrainedModel, predictions: Sequence[Prediction]) -> tuple[str, ...]:
    """A name for every class of the model, which may have more classes than the data; else numbers."""
    info = trained.data.info
    names = info.class_names or tuple(map(str, range(int(info.facts.get("num_classes", 0)))))
    count = len(predictions[0].probabilities) if predictions else 0
    return names + tuple(f"class {number}" for number in range(len(names), count))


# ---------------------------------------------------------------- predictions


def of_samples(trained: TrainedModel, samples: Samples, count: int) -> list[Prediction]:
    """`count` samples, evenly spread over all of them: the first ones alone may be of one class. Those of a
    stream are its first.
    """
    available = len(samples) if hasattr(samples, "__len__") else count
    count = min(count, available)
    predictions: list[Prediction] = []
    for first in range(0, count, BATCH):
        indices = np.arange(first, min(first + BATCH, count), dtype=np.int64) * available // count
        batch = samples.batch(indices)
        targets = batch.get("targets")
        if targets is None or targets.dim() != 1 or targets.is_floating_point():
            name = trained.config.data.name
            reason = f"--data.name {name} has no class for a sample, and its kind is not text."
            hint = "use the export with code of your own: this command predicts classes and generates text"
            raise ConfigError(reason, hint)
        rows = zip(indices, batch["inputs"], _probabilities(trained, batch["inputs"]), targets, strict=True)
        predictions += [Prediction(f"sample {n}", x.numpy(), p, int(truth)) for n, x, p, truth in rows]
    return predictions


def of_files(trained: TrainedModel, files: Sequence[str], invert: bool) -> list[Prediction]:
    """Image files, preprocessed as in training."""
    inputs = np.stack([_read(trained, Path(file), invert) for file in files])
    rows = zip(files, inputs, _probabilities(trained, torch.from_numpy(inputs)), strict=True)
    return [Prediction(Path(file).name, x, probabilities, None) for file, x, probabilities in rows]


def _probabilities(trained: TrainedModel, inputs: Tensor) -> Tensor:
    return trained.logits(inputs).float().softmax(-1).cpu()


def _read(trained: TrainedModel, file: Path, invert: bool) -> np.ndarray:
    from PIL import Image, ImageOps

    preprocess = trained.data.info.preprocess
    if not {"mean", "std", "image_size", "channels"} <= preprocess.keys():
        name = trained.config.data.name
        reason = f"--image {file}: --data.name {name} has no preprocessing of image files."
        hint = "return a DataSet whose DataInfo.preprocess has image_size, channels, mean and std"
        raise ConfigError(reason, hint)
    try:
        with Image.open(file) as image:
            shown = upright(image)
            return prepare(ImageOps.invert(shown.convert("RGB")) if invert else shown, preprocess)
    except FileNotFoundError:
        reason = f"--image {file} does not exist."
    except Exception as error:  # Pillow's decoders raise what they like
        reason = f"--image {file} is not an image: {message_line(error)}."
    raise ConfigError(reason, "--image FILE, in any format that Pillow reads")


def correct(trained: TrainedModel, samples: Samples) -> int:
    """The number of samples whose largest logit is that of their class."""
    right = 0
    for batch in heldout_batches(samples, batch=BATCH, rank=DataRank(0, 1), limit=0):
        best = trained.logits(batch.data["inputs"]).argmax(-1).cpu()
        right += int(((best == batch.data["targets"]) & batch.valid).sum())
    return right


# ---------------------------------------------------------------- the picture


def sheet(predictions: Sequence[Prediction], classes: Sequence[str], preprocess: Mapping[str, Any]) -> Image:
    """Class and probability under each image: green if correct, red if wrong."""
    from PIL import Image, ImageDraw

    columns = min(len(predictions), max(4, math.isqrt(len(predictions))))
    rows = -(-len(predictions) // columns)
    width, height = TILE + MARGIN, TILE + 2 * LINE + MARGIN
    drawn = Image.new("RGB", (columns * width + MARGIN, rows * height + MARGIN), PAPER)
    pen = ImageDraw.Draw(drawn)
    for nth, seen in enumerate(predictions):
        x, y = MARGIN + nth % columns * width, MARGIN + nth // columns * height
        tile = Image.fromarray(pixels_of(seen.inputs, preprocess))
        drawn.paste(tile.resize((TILE, TILE), Image.Resampling.NEAREST), (x, y))
        colour = INK if seen.truth is None else RIGHT if seen.truth == seen.best else WRONG
        predicted = f"{classes[seen.best]} {float(seen.probabilities.max()):.0%}"
        pen.text((x, y + TILE + 1), _fit(predicted), fill=colour)
        below = seen.name if seen.truth is None else f"is {classes[seen.truth]}"
        pen.text((x, y + TILE + LINE), _fit(below), fill=INK)
    return drawn


def pixels_of(inputs: np.ndarray, preprocess: Mapping[str, Any]) -> np.ndarray:
    """height × width × 3, 0 to 255; without known preprocessing from the smallest value to the largest."""
    if "mean" in preprocess:
        pixels = to_picture(inputs, preprocess)
    else:
        low, high = float(inputs.min()), float(inputs.max())
        stretched = (inputs - low) / max(high - low, 1e-12) * 255
        pixels = np.rint(stretched).astype(np.uint8).transpose(1, 2, 0)
    return pixels if pixels.shape[-1] == 3 else np.repeat(pixels[..., :1], 3, axis=-1)


def _fit(text: str) -> str:
    """ASCII, which Pillow's built-in font has, cut to the width of a tile."""
    plain = text.encode("ascii", "replace").decode()
    return plain if len(plain) <= TEXT_WIDTH else plain[: TEXT_WIDTH - 2] + ".."


def format_of(file: Path) -> str:
    """Pillow's format of this file name; ConfigError if there is none."""
    from PIL import Image

    known = Image.registered_extensions().get(file.suffix.lower())
    if known is None:
        raise ConfigError(f"--out {file} has no image file extension.", f"--out {file.with_suffix('.png')}")
    return known


def save(drawn: Image, file: Path) -> None:
    """A link at `file` is replaced, not followed."""
    encoded = io.BytesIO()
    drawn.save(encoded, format_of(file))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_with(file, [encoded.getvalue()])
    except OSError as error:
        reason = f"--out {file} cannot be written ({error.strerror})."
        raise ConfigError(reason, "--out predictions.png") from None
