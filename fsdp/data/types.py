"""The data types: Samples, DataInfo, DataSet, Batch, StepBatch, the arguments of a data set (Where); how the
fields of a user's items meet the parameters of forward (`matched`); and the one global cursor: (seed, step,
global batch) → sample indices, independent of the world size.

An epoch's order is a keyed permutation of 0…n-1 that is computed on demand: a generalised Feistel network on
a grid of a × b ≥ n cells, applied repeatedly until a number falls inside 0…n-1 (cycle walking: Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). It needs no array of n and no saved state, and any
step takes the same time. Not here: how ranks share a batch.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fsdp.base.errors import ConfigError, one_line
from fsdp.config import Args, DataSection, MixedSource
from fsdp.models.loss import TokenCounts

if TYPE_CHECKING:
    from fsdp.data.stream import StreamItems
    from fsdp.models.registry import ModelSpec


MASKED = -100
"""A target that is not trained on."""
ROUNDS = 8
AT_ONCE = 512
"""Positions computed together if batches are smaller: a permutation of 8 costs as much as one of hundreds."""
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S1, _S2, _S3 = np.uint64(30), np.uint64(27), np.uint64(31)


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
    fields: tuple[str, ...] = ()
    """Names in a sample of a data set of the user."""

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
            raise ConfigError(f"{self} has no effect on {name}.", "leave it out")


def text_info(
    where: Where, vocab_size: int, fingerprint: str, more: Mapping[str, Any] | None = None, **fields: Any
) -> DataInfo:
    """Of samples of seq_len tokens; `more` are facts beside these."""
    facts = {"vocab_size": vocab_size, "seq_len": where.seq_len, **(more or {}), "fingerprint": fingerprint}
    return DataInfo(kind="text", facts=facts, tokens_per_sample=where.seq_len, **fields)


def source_section(section: DataSection, source: MixedSource) -> DataSection:
    """A mixture's source as --data.name would give it, with the section's other fields."""
    names = ("name", "dir", "args", "tokenizer", "validation")
    return dataclasses.replace(section, sources=(), **{name: getattr(source, name) for name in names})


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


# ---------------------------------------------------------------- the fields of items and the model's forward

ITEMS_HINT = (
    "items are (inputs, targets), ((first, second), targets), or dicts with the names of forward's parameters"
)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32, *UNSIGNED)


def widened(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Targets and labels of whole numbers as int64, which cross entropy reads; arrays often have less."""
    long = [name for name in ("targets", "labels") if getattr(batch.get(name), "dtype", None) in _NARROW]
    return {name: value.long() if name in long else value for name, value in batch.items()}


class MatchedSamples:
    """Samples with the names of their fields replaced."""

    def __init__(self, samples: Samples, names: Mapping[str, str]) -> None:
        self._samples, self._names = samples, names

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        fields = self._samples.batch(indices).items()
        return widened({self._names.get(name, name): value for name, value in fields})


def matched(data: DataSet, spec: ModelSpec, *, own_loss: bool) -> DataSet:
    """The data with their fields under the names that a run reads: `inputs` is what forward's first parameter
    takes, the others have its parameters' names. A single field that forward does not take is `targets`,
    unless `own_loss`, the function of --train.loss, reads it; and the targets of a pair are what a single
    parameter without a field takes. ConfigError where they do not fit.
    """
    fields, parameters = data.info.fields, spec.takes
    inputs = [field for field in fields if field.partition(".")[0] == "inputs"]
    if not fields or (len(inputs) == 1 and parameters is None):
        return data
    if parameters is None:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            parameters = inspect.signature(spec.build().forward).parameters
    takes = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    names = dict(zip(inputs or takes, ["inputs", *takes[1 : len(inputs)]], strict=False))
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needs = [name for name, p in parameters.items() if p.kind in by_name and p.default is p.empty]
    known = (*fields, *takes[: len(inputs) or 1], "num_items_in_batch")
    lacking = [name for name in needs if name not in known]
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    rest = [field for field in fields if field not in (*parameters, *names)]
    if rest == ["targets"]:
        names |= {"targets": lacking.pop()} if len(lacking) == 1 else {}
    elif len(rest) == 1 and not own_loss and not any_name:
        names[rest[0]] = "targets"
    renamed = {names.get(field, field) for field in fields}
    if lacking or "inputs" not in renamed or len(renamed) < len(fields) or len(names) < len(inputs):
        raise ConfigError(
            f"the items of --data.name have {', '.join(fields)}, and the forward of --model.name {spec.name} "
            f"takes {', '.join(takes) or 'nothing by its place'}.",
            f"{ITEMS_HINT}: {', '.join(needs or takes) or 'def forward(self, NAME)'}",
        )
    if all(name == field for field, name in names.items()):
        return data
    train: Any = MatchedSamples(data.train, names)
    if data.stream is not None:
        from fsdp.data.stream import StreamSamples

        train = StreamSamples(data.stream, train.batch)
    heldout = data.heldout and MatchedSamples(data.heldout, names)
    return dataclasses.replace(data, train=train, heldout=heldout)


# ---------------------------------------------------------------- the cursor


def mix(values: np.ndarray, key: int) -> np.ndarray:
    """Mixes each uint64 with a key: splitmix64's finisher. Random access, without a generator's state."""
    x = values + np.uint64(key)
    x ^= x >> _S1
    x *= _M1
    x ^= x >> _S2
    x *= _M2
    x ^= x >> _S3
    return x


def stream_key(*parts: int | str) -> int:
    """Returns a 64-bit key for a named stream, the same on every machine."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class Permutation:
    """A keyed bijection of 0…n-1, evaluated at the given positions."""

    def __init__(self, n: int, key: tuple[int | str, ...]) -> None:
        self.n = n
        rows = max(1, math.isqrt(n - 1) + 1)
        self._sides = np.uint64(rows), np.uint64(-(-n // rows))
        self._keys = [stream_key("order", *key, n, r) for r in range(ROUNDS)]

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        values = self._shuffle(positions.astype(np.uint64))
        # The grid has fewer than √n cells too many: a second pass is rare, and never many follow.
        while (outside := np.flatnonzero(values >= self.n)).size:
            values[outside] = self._shuffle(values[outside])
        return values.astype(np.int64)

    def _shuffle(self, cells: np.ndarray) -> np.ndarray:
        rows, columns = self._sides
        left, right = np.divmod(cells, columns)
        for r in range(0, ROUNDS, 2):
            left = (left + mix(right, self._keys[r])) % rows
            right = (right + mix(left, self._keys[r + 1])) % columns
        return left * columns + right


class EpochWalk:
    """All samples of a data set, epoch after epoch, each epoch by a permutation of its own."""

    def __init__(self, samples: int, key: tuple[int | str, ...]) -> None:
        self.samples = samples
        self._order = functools.lru_cache(maxsize=4)(lambda epoch: Permutation(samples, (*key, epoch)))
        self._block = functools.lru_cache(maxsize=4)(self._look_up)

    def draws(self, first: int, count: int) -> np.ndarray:
        """The samples of the draws `first` … `first + count - 1`, of as many epochs as they take."""
        parts = []
        while count:
            epoch, place = divmod(first, self.samples)
            here = min(count, self.samples - place)
            parts.append(self.within(epoch, place, place + here))
            first, count = first + here, count - here
        return np.concatenate(parts)

    def within(self, epoch: int, first: int, last: int) -> np.ndarray:
        """The samples at the positions first … last-1 of an epoch's order."""
        if last - first >= AT_ONCE:
            return self._order(epoch)(np.arange(first, last))
        start = first // AT_ONCE
        blocks = [self._block(epoch, nth) for nth in range(start, (last - 1) // AT_ONCE + 1)]
        return np.concatenate(blocks)[first - start * AT_ONCE : last - start * AT_ONCE]

    def _look_up(self, epoch: int, nth: int) -> np.ndarray:
        """The nth block of an epoch's order."""
        return self._order(epoch)(np.arange(nth * AT_ONCE, min((nth + 1) * AT_ONCE, self.samples)))


class Cursor:
    """The samples of optimizer step 0, 1, 2 …: every sample once per epoch; its last batch is shorter.

    A run that changed its global batch counts from the step of that start, and the samples trained on before.
    """

    def __init__(self, *, seed: int, samples: int, global_batch: int, step: int = 0, drawn: int = 0) -> None:
        """`drawn`: samples of the steps before `step`, the first that this cursor gives."""
        if samples < 1:
            raise ConfigError("the data has no sample to train on.", "look into --data.dir")
        self.seed, self.samples, self.global_batch = seed, samples, global_batch
        self.steps_per_epoch = -(-samples // global_batch)
        self._walk = EpochWalk(samples, (seed,))
        self._step = step
        self._epoch, self._first = divmod(drawn, samples)
        self._rest = -(-(samples - self._first) // global_batch) if self._first else 0
        """Steps that complete the epoch in which it begins."""

    @property
    def end(self) -> int | None:
        """The step at which the data are complete; None for data that may be walked any number of times."""
        return None

    def steps_of(self, epochs: int) -> int:
        """The step at which so many epochs are complete; one before the first if they were already."""
        begun = self._epoch + (self._rest > 0)
        return max(1, self._step + self._rest + (epochs - begun) * self.steps_per_epoch)

    def epoch(self, step: int) -> Fraction:
        """Epochs complete after `step` steps: an epoch's samples seen, over all its samples."""
        epoch, first = self._place(step)
        return epoch + Fraction(first, self.samples)

    def saved(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps: nothing, since it has the step and the number of samples trained on."""
        return {}

    def resumed(self, step: int, drawn: int) -> Cursor:
        """The cursor of a run that resumes at `step`, after `drawn` samples: the next one comes first, also
        where another global batch drew those before.
        """
        if self._place(step) == divmod(drawn, self.samples):
            return self
        return Cursor(
            seed=self.seed, samples=self.samples, global_batch=self.global_batch, step=step, drawn=drawn
        )

    def note(self) -> str:
        """One line for the log of a resumed run, or ""."""
        if not self._step:
            return ""
        done = self._epoch + self._first / self.samples
        return f"the data continue at epoch {done:.2f}, with the sample after those that were trained on"

    def indices(self, step: int) -> np.ndarray:
        """Returns 1 … global_batch sample indices, int64, in the order in which ranks slice them."""
        epoch, first = self._place(step)
        return self._walk.within(epoch, first, min(first + self.global_batch, self.samples))

    def _place(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and the position of its first sample in the epoch's order."""
        place = step - self._step
        if place < self._rest:
            return self._epoch, self._first + place * self.global_batch
        epochs, place = divmod(place - self._rest, self.steps_per_epoch)
        return self._epoch + (self._rest > 0) + epochs, place * self.global_batch
