"""synthetic: random images or tokens, for measurements.

A sample is a slice of one table of noise, at a position derived from its index: producing one costs a copy.
Not for learning: a model can only memorise the labels.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fsdp.base.errors import ConfigError
from fsdp.data.cursor import mix, stream_key
from fsdp.data.types import DataInfo, DataSet, Where, check_range, shifted

PLACES = 1 << 16  # number of different slices


def build(
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
    if where.dir:
        raise ConfigError(f"--data.dir {where.dir} has no effect on synthetic.", "leave it out")
    sizes = {
        "image_size": image_size,
        "channels": channels,
        "num_classes": num_classes,
        "vocab_size": vocab_size,
    }
    check_range("samples", samples, 1)
    for name, value in {**sizes, "heldout": heldout}.items():
        check_range(name, value, 0)
    if kind == "auto":
        kind = "tokens" if vocab_size or "vocab_size" in where.model_facts else "images"
    known = {name: value for name, value in where.model_facts.items() if name in sizes}
    known |= {name: value for name, value in sizes.items() if value}
    of_images = known.keys() - {"vocab_size"}
    if wrong := known.keys() - of_images if kind == "images" else of_images:
        other = "tokens" if kind == "images" else "images"
        raise ConfigError(
            f"--data.args.{min(wrong)} {known[min(wrong)]} has no effect on {kind}.",
            f"--data.args.kind {other}",
        )
    return (_images if kind == "images" else _tokens)(known, where.seq_len, samples, heldout)


def _images(sizes: dict[str, Any], seq_len: int, samples: int, heldout: int) -> DataSet:
    facts = {"image_size": 28, "channels": 1, "num_classes": 10, **sizes}
    channels, size = facts["channels"], facts["image_size"]
    shape = (channels, size, size)
    noise = _generator().standard_normal(int(np.prod(shape)) + PLACES, dtype=np.float32)
    half = (0.5,) * channels
    info = DataInfo(
        kind="images",
        facts=facts,
        class_names=tuple(f"class {n}" for n in range(facts["num_classes"])),
        default_steps=20,
        preprocess={"image_size": size, "channels": channels, "mean": half, "std": half},
    )
    train, held = (
        NoiseImages(noise, shape, facts["num_classes"], name, count)
        for name, count in (("train", samples), ("heldout", heldout))
    )
    return DataSet(train=train, heldout=held if heldout else None, info=info)


def _tokens(sizes: dict[str, Any], seq_len: int, samples: int, heldout: int) -> DataSet:
    facts = {"vocab_size": 256, "seq_len": seq_len, **sizes}
    noise = _generator().integers(0, facts["vocab_size"], seq_len + 1 + PLACES)
    info = DataInfo(
        kind="text", facts=facts, tokens_per_sample=seq_len, masks_targets=False, default_steps=20
    )
    train, held = (
        NoiseTokens(noise, seq_len, name, count) for name, count in (("train", samples), ("heldout", heldout))
    )
    return DataSet(train=train, heldout=held if heldout else None, info=info)


def _generator() -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=stream_key("synthetic")))


class _Noise:
    def __init__(self, name: str, count: int) -> None:
        self.count = count
        self._place_key, self._label_key = stream_key(name, "place"), stream_key(name, "label")

    def __len__(self) -> int:
        return self.count

    def _places(self, indices: np.ndarray) -> np.ndarray:
        return (mix(indices.astype(np.uint64), self._place_key) % np.uint64(PLACES)).astype(np.int64)


class NoiseImages(_Noise):
    def __init__(
        self, noise: np.ndarray, shape: tuple[int, ...], classes: int, name: str, count: int
    ) -> None:
        super().__init__(name, count)
        self._noise, self._shape, self._classes = noise, shape, classes

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        inputs = np.empty((len(indices), *self._shape), np.float32)
        for out, place in zip(inputs, self._places(indices), strict=True):
            out.reshape(-1)[:] = self._noise[place : place + out.size]
        labels = mix(indices.astype(np.uint64), self._label_key) % np.uint64(self._classes)
        return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(labels.astype(np.int64))}


class NoiseTokens(_Noise):
    def __init__(self, noise: np.ndarray, seq_len: int, name: str, count: int) -> None:
        super().__init__(name, count)
        self._noise, self._seq_len = noise, seq_len

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        windows = np.empty((len(indices), self._seq_len + 1), np.int64)
        for out, place in zip(windows, self._places(indices), strict=True):
            out[:] = self._noise[place : place + len(out)]
        return shifted(windows)
