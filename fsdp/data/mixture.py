"""[[data.sources]]: several data sets as one, and the order of their samples.

All sources give the same fields of the same shapes, and describe the same vocabulary or classes. Held-out
samples are each source's own, one after the other. The order is (seed, segments, step) → sample indices,
independent of the number of ranks.

Which source: sample number t of a segment belongs to the source whose quota grows there. The quotas of all
sources at t sum to t, and each is its exact share of t to within half a sample for each doubling of the
number of sources. They follow from t alone: a tree of two-way splits, each rounded, in integers. A seeded
draw would need more samples until its proportions are right, and a shuffled block would have to be walked
from its beginning; here each global batch has each source's share, and any position takes the same time.
The rows of a batch are shuffled, so that each rank's part is mixed.

Which sample: each source is walked by its own permutation, one an epoch, as often as it is drawn.

A segment is a stretch of steps with the same weights, sources and global batch. It starts with the number of
samples drawn from each source before it; a change at a resume starts the next segment. Checkpoints keep the
segments. Also --data.validation: other files, or a share, as the held-out samples of one data set. Not here:
how a source is read.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from fsdp.base.errors import ConfigError
from fsdp.config import DataSection, MixedSource, check_labels
from fsdp.config.sections import exists, expanded, with_home
from fsdp.data.types import (
    DataInfo,
    DataSet,
    EpochWalk,
    MixedRows,
    Samples,
    Where,
    first_sample,
    mix,
    source_section,
    stream_key,
)
from fsdp.models.registry import PACKED, PREFIX

log = logging.getLogger(__name__)

MOST = 2**40
"""The sum of shares: a batch of 2**20 samples is then split in int64. Greater sums are scaled down."""
Amount = tuple[str, float]
"""("weight", 2.0), or ("epochs", 1.0) of a source."""
OWN_FACTS = ("fingerprint", "tokenizer")
"""Facts that may differ between sources: the vocabulary is what has to agree."""


def build(section: DataSection, build_source: Callable[[DataSection], DataSet]) -> DataSet:
    """Builds every source as --data.name would, with the section's other fields, and joins them.

    `build_source` receives a source with its own tokenizer alone.
    """
    check_labels(section.sources)  # of a Config that is made in code
    made = {source.label: _built(section, source, build_source) for source in section.sources}
    (first, ours), *others = ((label, _described(label, data)) for label, data in made.items())
    for label, theirs in others:
        if wrong := [name for name in ours if ours[name] != theirs.get(name, ours[name])]:
            raise ConfigError(
                f"[[data.sources]] {first} and {label} differ in {wrong[0]}: {ours[wrong[0]]} and "
                f"{theirs[wrong[0]]}.",
                "one --data.tokenizer DIR for all; for token files args = {vocab_size = N}"
                if wrong[0] == "vocab_size"
                else "make their samples alike, or leave one of the sources out",
            )
    held = {label: data.heldout for label, data in made.items() if data.heldout is not None}
    sizes = [0 if data.heldout is None else len(data.heldout) for data in made.values()]
    train = MixedSamples({label: data.train for label, data in made.items()})
    return DataSet(
        train=train,
        heldout=MixedSamples(held) if held else None,
        info=_joined(made),
        sources=MixedRows(tuple(made), train.ends, np.cumsum(sizes, dtype=np.int64)),
    )


def first_segment(section: DataSection, data: DataSet, *, global_batch: int, epochs: int) -> MixSegment:
    """The mixture of a run that starts. Without weight and epochs, each source is seen `epochs` times."""
    assert data.sources is not None
    sizes = np.diff(data.sources.train_ends, prepend=0).tolist()
    amounts: dict[str, Amount] = {
        source.label: ("weight", float(source.weight))
        if source.weight
        else ("epochs", float(source.epochs or max(1, epochs)))
        for source in section.sources
    }
    samples = dict(zip(data.sources.labels, sizes, strict=True))
    return MixSegment(step=0, global_batch=global_batch, samples=samples, amounts=amounts, drawn={})


def _built(
    section: DataSection, source: MixedSource, build_source: Callable[[DataSection], DataSet]
) -> DataSet:
    label = f"[[data.sources]] {source.label}"
    try:
        data = build_source(source_section(section, source))
    except ConfigError as error:
        error.args = (f"{label}: {error}",)
        raise
    if data.stream is not None:
        reason = f"{label}: {source.name} is a stream, and a mixture needs the number of samples of each."
        raise ConfigError(reason, f"--data.name {source.name} alone, or mix inside the stream")
    if not len(data.train):
        raise ConfigError(f"{label} has no sample to train on.", f"ls {source.dir or source.name}")
    return data


def _described(label: str, data: DataSet) -> dict[str, Any]:
    """What has to be the same in all sources that have it: facts, and the fields of a sample."""
    info, sample = data.info, first_sample(f"[[data.sources]] {label}", data.train, "repair it")
    fields = sorted((name, f"{value.dtype} {list(value.shape[1:])}") for name, value in sample.items())
    return {
        "kind": info.kind,
        "class_names": info.class_names,
        **{name: value for name, value in info.facts.items() if name not in (*OWN_FACTS, PACKED)},
        "samples": ", ".join(f"{name} {form}" for name, form in fields),
    }


def _joined(made: Mapping[str, DataSet]) -> DataInfo:
    infos = [data.info for data in made.values()]
    facts = {name: value for info in reversed(infos) for name, value in info.facts.items()}
    prints = [
        f"{label} {len(data.train)} {data.info.facts.get('fingerprint', '')}" for label, data in made.items()
    ]
    facts["fingerprint"] = hashlib.sha256("\n".join(prints).encode()).hexdigest()[:16]
    return dataclasses.replace(
        infos[0],
        facts=facts,
        masks_targets=any(info.masks_targets for info in infos),
        default_steps=max(info.default_steps for info in infos),
        default_epochs=max(info.default_epochs for info in infos),
        preprocess={name: value for info in reversed(infos) for name, value in info.preprocess.items()},
    )


class MixedSamples:
    """The samples of several sources, one source after the other."""

    def __init__(self, parts: Mapping[str, Samples]) -> None:
        self.parts = list(parts.values())
        self.ends = np.cumsum([len(part) for part in self.parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Each source reads its rows at once; they are put into the order of `indices`."""
        sources, starts = np.searchsorted(self.ends, indices, side="right"), [0, *self.ends.tolist()]
        rows = {int(source): np.flatnonzero(sources == source) for source in np.unique(sources)}
        batches = [self.parts[n].batch(indices[numbers] - starts[n]) for n, numbers in rows.items()]
        if len(batches) == 1:
            return batches[0]
        order = torch.from_numpy(np.argsort(np.concatenate(list(rows.values())), kind="stable"))
        return {name: torch.cat([batch[name] for batch in batches])[order] for name in batches[0]}


# ---------------------------------------------------------------- the order


@dataclass(frozen=True)
class MixSegment:
    """Steps from `step` on, by label: samples of each source, what the recipe gives, samples drawn before."""

    step: int
    global_batch: int
    samples: Mapping[str, int]
    amounts: Mapping[str, Amount]
    drawn: Mapping[str, int]
    """Also of sources that earlier segments had."""

    @property
    def by_epochs(self) -> bool:
        return any(kind == "epochs" for kind, _ in self.amounts.values())

    @functools.cached_property
    def shares(self) -> tuple[int, ...]:
        """Whole numbers in the proportions of the sources; by epochs, the samples that each gives in all."""
        if not self.by_epochs:
            return whole_shares([value for _, value in self.amounts.values()])
        exact = (self.samples[label] * Fraction(str(value)) for label, (_, value) in self.amounts.items())
        return tuple(max(1, round(share)) for share in exact)

    @functools.cached_property
    def rest(self) -> tuple[int, ...]:
        """By epochs, the samples that each source still gives; all 0 if the epochs were complete before."""
        pairs = zip(self.shares, self.amounts, strict=True)
        return tuple(max(0, share - self.drawn.get(label, 0)) for share, label in pairs)

    def as_json(self) -> dict[str, Any]:
        """The order of sources is part of the order of samples: a list, since JSON's keys may be sorted."""
        sources = [[label, samples, *self.amounts[label]] for label, samples in self.samples.items()]
        return {
            "step": self.step,
            "global_batch": self.global_batch,
            "sources": sources,
            "drawn": dict(self.drawn),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> MixSegment:
        samples = {label: samples for label, samples, _, _ in value["sources"]}
        amounts = {label: (kind, float(amount)) for label, _, kind, amount in value["sources"]}
        return MixSegment(value["step"], value["global_batch"], samples, amounts, value["drawn"])


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the proportions of these decimal numbers: 0.7, 0.2, 0.1 → 7, 2, 1."""
    exact = [Fraction(str(weight)) for weight in weights]
    unit = math.lcm(*(share.denominator for share in exact))
    multiples = [int(share * unit) for share in exact]
    divisor = math.gcd(*multiples)
    shares = [share // divisor for share in multiples]
    if sum(shares) <= MOST:
        return tuple(shares)
    return tuple(max(1, share * (MOST // 2) // sum(shares)) for share in shares)


# ---------------------------------------------------------------- which source


def divide(shares: Sequence[int], first: int, count: int) -> tuple[np.ndarray, list[int]]:
    """Divides positions 0, 1, 2 … among sources in proportion to their shares: the source of each of `count`
    positions from `first` on, and each source's quota before them.
    """
    owner = np.zeros(count, np.int64)
    before = [0] * len(shares)

    def split(low: int, high: int, base: int, places: np.ndarray) -> None:
        """Sources low … high-1 own `places`, and `base` positions before them."""
        if high - low == 1:
            owner[places], before[low] = low, base
            return
        middle = (low + high) // 2
        total, left = sum(shares[low:high]), sum(shares[low:middle])
        if not total:
            return  # they give no sample any more
        # The left half's quota at n is n · left / total, rounded. From `base` on only the rest is counted.
        quota, rest = divmod(2 * base * left + total, 2 * total)
        steps = np.arange(len(places) + 1, dtype=np.int64)
        to_left = np.diff((rest + 2 * left * steps) // (2 * total)) == 1
        split(low, middle, quota, places[to_left])
        split(middle, high, base - quota, places[~to_left])

    split(0, len(shares), first, np.arange(count))
    return owner, before


class _Stretch(NamedTuple):
    """The positions of one step, in a pass over the sources."""

    shares: tuple[int, ...]
    first: int
    size: int
    before: tuple[int, ...]
    """Samples of each source in the segment's passes before this one."""


def _stretch(segment: MixSegment, step: int) -> _Stretch:
    """By epochs, the first pass has what the sources still give, and the further ones all of their epochs."""
    steps, batch, shares = step - segment.step, segment.global_batch, segment.shares
    none = (0,) * len(shares)
    if not segment.by_epochs:
        return _Stretch(shares, steps * batch, batch, none)
    rest = segment.rest
    of_first_pass = -(-sum(rest) // batch)
    if steps < of_first_pass:
        return _Stretch(rest, steps * batch, min(batch, sum(rest) - steps * batch), none)
    passes, steps = divmod(steps - of_first_pass, -(-sum(shares) // batch))
    before = tuple(left + passes * share for left, share in zip(rest, shares, strict=True))
    return _Stretch(shares, steps * batch, min(batch, sum(shares) - steps * batch), before)


# ---------------------------------------------------------------- which sample


class MixCursor:
    """The samples of each step of a mixture, as indices into its concatenated sources."""

    def __init__(self, *, seed: int, segments: Sequence[MixSegment]) -> None:
        self.seed, self.segments = seed, tuple(segments)
        self._walk = functools.lru_cache(maxsize=None)(
            lambda label, samples: EpochWalk(samples, (seed, label))
        )

    @property
    def now(self) -> MixSegment:
        """The last segment, which the run is in."""
        return self.segments[-1]

    @property
    def samples(self) -> int:
        """Samples of an epoch: those until all epochs are complete, or one pass of every source."""
        now = self.now
        return (sum(now.rest) or sum(now.shares)) if now.by_epochs else sum(now.samples.values())

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.now.global_batch)

    @property
    def end(self) -> int | None:
        """The step at which all epochs are complete; None for weights."""
        now = self.now
        return now.step + -(-sum(now.rest) // now.global_batch) if now.by_epochs else None

    def epoch(self, step: int) -> Fraction:
        """Epochs complete after `step` steps; an epoch is as many samples as the sources hold together.

        A changed mixture counts from its first step with the samples that it then holds.
        """
        epochs, ends = Fraction(0), [*(segment.step for segment in self.segments[1:]), step]
        for number, (segment, end) in enumerate(zip(self.segments, ends, strict=True)):
            begin = segment.step if number else 0
            if begin < step:
                last, first = _stretch(segment, min(end, step)), _stretch(segment, begin)
                seen = sum(last.before) + last.first - sum(first.before) - first.first
                epochs += Fraction(seen, sum(segment.samples.values()))
        return epochs

    def indices(self, step: int) -> np.ndarray:
        """Returns 1 … global_batch sample indices, int64, in the order in which ranks slice them."""
        segment = self._segment(step)
        stretch = _stretch(segment, step)
        owner, _ = divide(stretch.shares, stretch.first, stretch.size)
        drawn, indices = self.drawn(step), np.empty(stretch.size, np.int64)
        offset = 0
        for source, (label, samples) in enumerate(segment.samples.items()):
            rows = np.flatnonzero(owner == source)
            if len(rows):
                indices[rows] = offset + self._walk(label, samples).draws(drawn[label], len(rows))
            offset += samples
        key = stream_key("rows", self.seed, step)
        return indices[np.argsort(mix(np.arange(len(indices), dtype=np.uint64), key), kind="stable")]

    def drawn(self, step: int) -> dict[str, int]:
        """Samples drawn from each source before `step`, of all segments."""
        segment = self._segment(step)
        stretch = _stretch(segment, step)
        _, quotas = divide(stretch.shares, stretch.first, 0)
        counts = zip(segment.samples, stretch.before, quotas, strict=True)
        now = {label: segment.drawn.get(label, 0) + before + quota for label, before, quota in counts}
        return {**segment.drawn, **now}

    def _segment(self, step: int) -> MixSegment:
        return next((past for past in reversed(self.segments) if past.step <= step), self.segments[0])

    # ------------------------------------------------------------ over starts

    def saved(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"mixture": [segment.as_json() for segment in self.segments]}

    def resumed(self, saved: Mapping[str, Any], step: int) -> MixCursor:
        """The cursor of a run that resumes at `step`: a changed mixture continues each source where it stood.

        A step before the last segment, from an older checkpoint, drops that segment.
        """
        before = [MixSegment.from_json(segment) for segment in saved.get("mixture", [])]
        before = [segment for segment in before if segment.step <= step]
        if not before:
            return MixCursor(seed=self.seed, segments=[dataclasses.replace(self.now, step=step)])
        past, old = MixCursor(seed=self.seed, segments=before), before[-1]
        unchanged = dataclasses.replace(self.now, step=old.step, drawn=old.drawn)
        if unchanged == old and list(unchanged.samples) == list(old.samples):
            return past
        begun = dataclasses.replace(self.now, step=step, drawn=past.drawn(step))
        return MixCursor(seed=self.seed, segments=[*before[: -1 if old.step == step else None], begun])

    def note(self) -> str:
        """One line about the segment that a resume has started; empty for the first."""
        sources = ", ".join(f"{label} {kind} {value:g}" for label, (kind, value) in self.now.amounts.items())
        return f"mixture from step {self.now.step} on: {sources}" if self.now.step else ""


# ---------------------------------------------------------------- --data.validation


def share_of(text: str) -> float:
    """Of `0.05`; 0 for the name of files, or of a split."""
    try:
        share = float(text)
    except ValueError:
        return 0.0
    if not 0 < share <= 0.5 and not exists(text):
        raise ConfigError(f"--data.validation {text} is no share from 0 to 0.5.", "--data.validation 0.05")
    return share if 0 < share <= 0.5 else 0.0


def validated(section: DataSection, build: Callable[..., DataSet], where: Where, alone: bool) -> DataSet:
    """A share of the data held out; or all samples of other files, read in the same way."""
    from fsdp.tokenize.rows import MANIFEST

    default = getattr(inspect.signature(build).parameters.get("heldout"), "default", None)
    share, files = share_of(section.validation), section.validation

    def whole(where: Where, **more: Any) -> DataSet:
        divided = isinstance(default, float) and not (Path(where.dir) / MANIFEST).is_file()
        return build(where, **({"heldout": 0.0} if divided else {}), **more)

    if share:
        if not isinstance(default, float):
            reason = f"--data.validation {share:g} has no effect on --data.name {section.name}: its own rule"
            hint = "leave it out; docs/data.md has the rule of each data set"
            raise ConfigError(f"{reason} says what is held out.", hint)
        return build(where, heldout=share)
    if where.dir.startswith(PREFIX) and not (files.startswith(PREFIX) or exists(expanded(files))):
        held = whole(where, split=files)
    else:
        held = whole(dataclasses.replace(where, dir=with_home(files), flag="--data.validation"))
    data = held if alone else whole(where)
    for name in ("vocab_size", "num_classes"):
        both = held.info.facts.get(name), data.info.facts.get(name)
        if both[0] != both[1] or held.info.classes != data.info.classes:
            reason = f"--data.validation {files} has other classes, or {name} {both[0]} where {both[1]}"
            raise ConfigError(f"{reason} are trained on.", "files of the same form, --data.validation FILE")
    samples: Samples = held.train
    if held.heldout is not None:
        parts = {"train": held.train, "heldout": held.heldout}
        samples = MixedSamples(parts)
    log.info("--data.validation %s: all %s samples are held out", files, f"{len(samples):,}")
    return dataclasses.replace(data, heldout=samples)


def with_share(section: DataSection, built: DataSet) -> DataSet:
    """Every Nth item of a user's Dataset held out."""
    share, items = share_of(section.validation), getattr(built.train, "items", None)
    if not share or built.heldout is not None or built.stream is not None or items is None:
        raise ConfigError(
            f"--data.validation {section.validation} has no effect on --data.name {section.name}: of code, a "
            "share of a Dataset without held-out items is held out.",
            "return the pair (train, heldout)",
        )
    numbers, every = np.arange(len(items)), max(2, round(1 / share))
    held = numbers % every == every - 1
    kind: Any = type(built.train)
    train, heldout = (kind(Subset(items, numbers[part].tolist())) for part in (~held, held))
    return dataclasses.replace(built, train=train, heldout=heldout if len(heldout) else None)
