"""[[data.sources]]: several data sets as one. Their samples are concatenated; the order is mixing_order.py.

All sources give the same fields of the same shapes, and describe the same vocabulary or classes. Held-out
samples are each source's own, one after the other. Not here: how a source is read.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp.base.errors import ConfigError, OneRankError
from fsdp.config import DataSection, MixedSource, check_labels
from fsdp.data.arguments import source_section
from fsdp.data.mixing_order import MixSegment
from fsdp.data.types import DataInfo, DataSet, MixedRows, Samples, first_sample
from fsdp.models.checks import PACKED

OWN_FACTS = ("fingerprint", "tokenizer")
"""Facts that may differ between sources: the vocabulary is what has to agree."""


def build(section: DataSection, build_one: Callable[[DataSection], DataSet]) -> DataSet:
    """Builds every source as --data.name would, with the section's other fields, and joins them.

    `build_one` receives a source with its own tokenizer alone.
    """
    check_labels(section.sources)  # of a Config that is made in code
    made = {one.label: _built(section, one, build_one) for one in section.sources}
    _check_alike(made)
    held = {label: data.heldout for label, data in made.items() if data.heldout is not None}
    labels = tuple(made)
    return DataSet(
        train=MixedSamples({label: data.train for label, data in made.items()}),
        heldout=MixedSamples(held) if held else None,
        info=_joined(made),
        sources=MixedRows(
            labels,
            _ends([len(data.train) for data in made.values()]),
            _ends([len(data.heldout) if data.heldout is not None else 0 for data in made.values()]),
        ),
    )


def first_segment(section: DataSection, data: DataSet, *, global_batch: int, epochs: int) -> MixSegment:
    """The mixture of a run that starts. Without weight and epochs, each source is seen `epochs` times."""
    assert data.sources is not None
    sizes = np.diff(data.sources.train_ends, prepend=0).tolist()
    return MixSegment(
        step=0,
        global_batch=global_batch,
        samples=dict(zip(data.sources.labels, sizes, strict=True)),
        amounts={
            one.label: ("weight", float(one.weight))
            if one.weight
            else ("epochs", float(one.epochs or max(1, epochs)))
            for one in section.sources
        },
        drawn={},
    )


def _built(section: DataSection, one: MixedSource, build_one: Callable[[DataSection], DataSet]) -> DataSet:
    try:
        data = build_one(source_section(section, one))
    except ConfigError as error:
        error.args = (f"[[data.sources]] {one.label}: {error}",)
        raise
    if data.stream is not None:
        raise ConfigError(
            f"[[data.sources]] {one.label}: {one.name} is a stream, and a mixture needs the number of "
            "samples of each source.",
            f"--data.name {one.name} alone, or mix inside the stream",
        )
    if not len(data.train):
        raise ConfigError(
            f"[[data.sources]] {one.label} has no sample to train on.", f"ls {one.dir or one.name}"
        )
    return data


# ---------------------------------------------------------------- what sources have in common


def _check_alike(made: Mapping[str, DataSet]) -> None:
    (first, one), *others = made.items()
    fields = _fields(first, one.train)
    for label, other in others:
        pair = f"[[data.sources]] {first} and {label}"
        if bool(one.info.facts.get(PACKED)) != bool(other.info.facts.get(PACKED)):
            packed, plain = (first, label) if one.info.facts.get(PACKED) else (label, first)
            raise ConfigError(
                f"{pair}: the rows of {packed} are packed, those of {plain} are not.",
                f'args = {{rows = "packed"}} in {plain}, if its name is documents; or without it in {packed}',
            )
        for name, (mine, theirs) in _described(one.info, other.info).items():
            if mine != theirs:
                raise ConfigError(f"{pair} differ in {name}: {mine} and {theirs}.", _hint(name, mine))
        found = _fields(label, other.train)
        for name in dict.fromkeys([*fields, *found]):
            if fields.get(name) != found.get(name):
                raise ConfigError(
                    f"{pair} differ in {name} of a sample: {_shown(fields.get(name))} and "
                    f"{_shown(found.get(name))}.",
                    "make their samples alike, or leave one of the sources out",
                )


def _described(one: DataInfo, other: DataInfo) -> dict[str, tuple[Any, Any]]:
    """What both describe, by name."""
    both = {"kind": (one.kind, other.kind), "class_names": (one.class_names, other.class_names)}
    return both | {
        name: (value, other.facts[name])
        for name, value in one.facts.items()
        if name in other.facts and name not in OWN_FACTS
    }


def _hint(name: str, value: Any) -> str:
    if name == "vocab_size":
        return "one tokenizer for all sources: --data.tokenizer DIR; for token files args = {vocab_size = N}"
    if name in ("image_size", "channels"):
        return f"args = {{{name} = {value}}} in the other source, if it takes that"
    return "a mixture has one kind of data: leave one of the sources out"


def _fields(label: str, samples: Samples) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The fields of the first sample."""
    found = first_sample(f"[[data.sources]] {label}", samples, "repair it")
    return {name: (tuple(value.shape[1:]), value.dtype) for name, value in found.items()}


def _shown(field: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "none" if field is None else f"{str(field[1]).removeprefix('torch.')} {list(field[0])}"


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


# ---------------------------------------------------------------- reading


def _ends(sizes: list[int]) -> np.ndarray:
    return np.cumsum(np.array(sizes, np.int64))


class MixedSamples:
    """The samples of several sources, one source after the other."""

    def __init__(self, parts: Mapping[str, Samples]) -> None:
        self.parts = dict(parts)
        self._labels = tuple(self.parts)
        self._ends = _ends([len(part) for part in self.parts.values()])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Each source reads its rows at once; they are put into the order of `indices`."""
        places = np.searchsorted(self._ends, indices, side="right")
        rows = {int(place): np.flatnonzero(places == place) for place in np.unique(places)}
        read = {place: self._read(place, indices[at]) for place, at in rows.items()}
        if len(read) == 1:
            return next(iter(read.values()))
        (first, one), *others = read.items()
        for place, other in others:
            self._check_alike(first, one, place, other)
        order = torch.from_numpy(np.argsort(np.concatenate(list(rows.values())), kind="stable"))
        return {name: torch.cat([part[name] for part in read.values()])[order] for name in one}

    def _read(self, place: int, indices: np.ndarray) -> dict[str, Tensor]:
        start = int(self._ends[place - 1]) if place else 0
        return self.parts[self._labels[place]].batch(indices - start)

    def _check_alike(self, first: int, one: dict[str, Tensor], place: int, other: dict[str, Tensor]) -> None:
        for name in dict.fromkeys([*one, *other]):
            shapes = [tuple(part[name].shape[1:]) if name in part else None for part in (one, other)]
            if shapes[0] != shapes[1]:
                said = " and ".join("none" if shape is None else str(list(shape)) for shape in shapes)
                raise OneRankError(
                    f"the sources {self._labels[first]} and {self._labels[place]} differ in {name} of a "
                    f"sample: {said}.",
                    "pad the samples of both to one length: docs/data.md",
                )
