"""Predicted classes of samples and of image files, and the accuracy on held-out data. Not here: drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    inputs: np.ndarray
    probabilities: Tensor
    truth: int | None

    @property
    def best(self) -> int:
        return int(self.probabilities.argmax())


def classes_of(trained: TrainedModel) -> tuple[str, ...]:
    """Names, or numbers if the data has no names."""
    info = trained.data.info
    return info.class_names or tuple(map(str, range(int(info.facts.get("num_classes", 0)))))


def of_samples(trained: TrainedModel, samples: Samples, count: int) -> list[Prediction]:
    """`count` samples, evenly spread over all of them: the first ones alone may be of one class. Those of a
    stream are its first.
    """
    available = len(samples) if hasattr(samples, "__len__") else count
    count = min(count, available)
    indices = np.arange(count, dtype=np.int64) * available // max(count, 1)
    predictions: list[Prediction] = []
    for chosen in np.array_split(indices, max(1, -(-count // BATCH))) if count else []:
        batch = samples.batch(chosen)
        _check_classes(trained, batch)
        rows = zip(
            chosen, batch["inputs"], _probabilities(trained, batch["inputs"]), batch["targets"], strict=True
        )
        predictions += [
            Prediction(f"sample {index}", x.numpy(), probabilities, int(truth))
            for index, x, probabilities, truth in rows
        ]
    return predictions


def _check_classes(trained: TrainedModel, batch: Mapping[str, Tensor]) -> None:
    targets = batch.get("targets")
    if targets is None or targets.dim() != 1 or targets.is_floating_point():
        raise ConfigError(
            f"--data.name {trained.config.data.name} has no class for a sample, and its kind is not text.",
            "use the export with code of your own: this command predicts classes and generates text",
        )


def _probabilities(trained: TrainedModel, inputs: Tensor) -> Tensor:
    return trained.logits(inputs).float().softmax(-1).cpu()


def of_files(trained: TrainedModel, files: Sequence[str], invert: bool) -> list[Prediction]:
    """Image files, preprocessed as in training."""
    inputs = np.stack([_read(trained, Path(file), invert) for file in files])
    probabilities = _probabilities(trained, torch.from_numpy(inputs))
    return [
        Prediction(Path(f).name, x, p, None) for f, x, p in zip(files, inputs, probabilities, strict=True)
    ]


def _read(trained: TrainedModel, file: Path, invert: bool) -> np.ndarray:
    from PIL import Image, ImageOps

    preprocess = trained.data.info.preprocess
    if not {"mean", "std", "image_size", "channels"} <= preprocess.keys():
        raise ConfigError(
            f"--image {file}: --data.name {trained.config.data.name} has no preprocessing of image files.",
            "return a DataSet whose DataInfo.preprocess has image_size, channels, mean and std",
        )
    try:
        with Image.open(file) as image:
            shown = upright(image)
            return prepare(ImageOps.invert(shown.convert("RGB")) if invert else shown, preprocess)
    except FileNotFoundError:
        raise ConfigError(
            f"--image {file} does not exist.", "--image FILE, in any format that Pillow reads"
        ) from None
    except Exception as error:  # Pillow's decoders raise what they like
        raise ConfigError(
            f"--image {file} is not an image: {message_line(error)}.",
            "--image FILE, in any format that Pillow reads",
        ) from None


def accuracy(trained: TrainedModel, samples: Samples) -> tuple[int, int]:
    """(correct, all): every sample once, the largest logit against the target."""
    right = 0
    for batch in heldout_batches(samples, batch=BATCH, rank=DataRank(0, 1), limit=0):
        best = trained.logits(batch.data["inputs"]).argmax(-1).cpu()
        right += int(((best == batch.data["targets"]) & batch.valid).sum())
    return right, len(samples)
