"""The data types: Samples, DataInfo, DataSet, Batch, StepBatch, and the arguments of a data set (Where)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fsdp.base.errors import ConfigError, one_line
from fsdp.config import Args, DataSection, MixedSource
from fsdp.models.loss import TokenCounts

if TYPE_CHECKING:
    from fsdp.data.stream import StreamItems


MASKED = -100
"""A target that is not trained on."""


class Samples(Protocol):
    """Samples by index. An index selects the same sample on every rank and in every thread."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """int64 indices → "inputs" and "targets" (a target of -100 is a masked token), one row an index."""
        ...


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    """Describes the data: for the model (facts), for display (class_names), for prediction (preprocess)."""

    kind: Literal["images", "text", "other"]
    facts: Args = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    tokens_per_sample: int = 0
    masks_targets: bool = True
    """False if no target is ever masked: a step's tokens then need no counting."""
    default_epochs: int = 0
    default_steps: int = 0
    preprocess: Args = field(default_factory=dict)

    @property
    def classes(self) -> str:
        """A digest of the names of the classes in the order of the model's outputs; empty without names."""
        if not self.class_names:
            return ""
        return hashlib.sha256(json.dumps(self.class_names).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class MixedRows:
    """Which source of a mixture a sample is from: the labels, and where each source's indices end."""

    labels: tuple[str, ...]
    train_ends: np.ndarray
    heldout_ends: np.ndarray

    def of_train(self, indices: np.ndarray) -> Tensor:
        """int64 numbers of the sources, in the order of labels."""
        return torch.from_numpy(np.searchsorted(self.train_ends, indices, side="right"))

    def of_heldout(self, indices: np.ndarray) -> Tensor:
        return torch.from_numpy(np.searchsorted(self.heldout_ends, indices, side="right"))


@dataclass(frozen=True, kw_only=True)
class DataSet:
    train: Samples
    heldout: Samples | None
    info: DataInfo
    sources: MixedRows | None = None
    """Of a mixture ([[data.sources]])."""
    stream: StreamItems | None = None
    """Of data without a length: the indices of `train` are positions, and it has no len()."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch: the first valid_rows rows are samples, the rest is padding excluded from the loss."""

    data: Mapping[str, Tensor]
    valid: Tensor
    valid_rows: int
    counted: Mapping[str, TokenCounts] = field(default_factory=dict)
    """Unmasked "targets" and "labels" of tokens, counted on the host before the copy to a device."""
    sources: Tensor | None = None
    """In a mixture, the number of each row's source."""

    @property
    def tokens(self) -> int:
        """Tokens, for throughput."""
        return next((counts.all for counts in self.counted.values()), 0)

    def to(self, device: torch.device) -> Batch:
        """Copies to the device; from pinned memory without blocking."""
        if device.type == "cpu":
            return self
        moved = {name: value.to(device, non_blocking=True) for name, value in self.data.items()}
        sources = None if self.sources is None else self.sources.to(device, non_blocking=True)
        return Batch(moved, self.valid.to(device, non_blocking=True), self.valid_rows, self.counted, sources)


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one rank in one optimizer step; `samples` counts the valid ones of all ranks."""

    micro: list[Batch]
    samples: int
    seed: int = 0
    """Of the random streams of this rank's step."""
    epoch: float | None = None
    """Epochs complete after the step, with their fraction; None for a stream."""
    arrived: Any = None
    """On CUDA, the event after which its tensors may be read (fsdp/data/loader.py)."""


@dataclass(frozen=True)
class Where:
    """Arguments common to all data sets: --data.dir, seq_len, tokenizer, and the model's facts."""

    dir: str
    seq_len: int
    model_facts: Args
    flag: str = "--data.dir"
    """The flag that gave `dir`: --data.name if that is a path."""
    tokenizer: str = ""

    def __str__(self) -> str:
        return f"{self.flag} {self.dir}"

    def refuse_dir(self, name: str) -> None:
        if self.dir:
            raise ConfigError(f"--data.dir {self.dir} has no effect on {name}.", "leave it out")


def text_info(
    where: Where, vocab_size: int, fingerprint: str, more: Mapping[str, Any] | None = None, **fields: Any
) -> DataInfo:
    """Of samples of seq_len tokens; `more` are facts beside these."""
    facts = {"vocab_size": vocab_size, "seq_len": where.seq_len, **(more or {}), "fingerprint": fingerprint}
    return DataInfo(kind="text", facts=facts, tokens_per_sample=where.seq_len, **fields)


def source_section(section: DataSection, source: MixedSource) -> DataSection:
    """A mixture's source as --data.name would give it, with the section's other fields."""
    return dataclasses.replace(
        section, name=source.name, dir=source.dir, args=source.args, tokenizer=source.tokenizer, sources=()
    )


def check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Raises ConfigError if an argument of a data set is out of range."""
    if not low <= value <= high:
        raise ConfigError(
            f"--data.args.{name} {value} is not between {low} and {high}.",
            f"--data.args.{name} {max(low, min(value, high))}",
        )


def shifted(windows: np.ndarray) -> dict[str, Tensor]:
    """Splits [n, seq_len + 1] tokens into inputs and targets, the token that follows each."""
    tokens = torch.from_numpy(windows.astype(np.int64))
    return {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def first_sample(name: str, samples: Samples, hint: str) -> dict[str, Tensor]:
    """The batch of sample 0. An error names the data set by `name`, such as "--data.name mine:build"."""
    try:
        return samples.batch(np.array([0], np.int64))
    except Exception as error:
        raise ConfigError(f"{name}: sample 0 cannot be read: {one_line(error)}.", hint) from error
