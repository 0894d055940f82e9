"""Predicted classes of samples and of image files, and the accuracy.

Preprocessing is that of training: it comes from the data's DataInfo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fsdp.base.errors import ConfigError, message_line
from fsdp.data import Samples, heldout_batches
from fsdp.data.images import prepare, upright
from fsdp.dist.mesh import DataRank
from fsdp.predict.trained import TrainedModel

BATCH = 64


@dataclass(frozen=True)
class Prediction:
    """Class probabilities of one image; truth is None if it is unknown."""

    name: str
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
        rows = zip(indices, _probabilities(trained, batch["inputs"]), targets, strict=True)
        predictions += [Prediction(f"sample {n}", p, int(truth)) for n, p, truth in rows]
    return predictions


def of_files(trained: TrainedModel, files: Sequence[str], invert: bool) -> list[Prediction]:
    """Image files, preprocessed as in training."""
    inputs = torch.from_numpy(np.stack([_read(trained, Path(file), invert) for file in files]))
    rows = zip(files, _probabilities(trained, inputs), strict=True)
    return [Prediction(Path(file).name, probabilities, None) for file, probabilities in rows]


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
