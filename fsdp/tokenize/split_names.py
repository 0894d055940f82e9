"""Files and folders named after a split of the data: train, val, test."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath

_TRAIN = r"train(ing|val)?"
_OTHER = r"(val|valid|validation|dev|eval|test|testing)"
_END = r"([-_.\d].*)?"


def is_train(name: str) -> bool:
    """Whether it is `train`, also with a number, a suffix or another end: train-00000-of-00002.parquet."""
    return re.fullmatch(_TRAIN + _END, name, re.I) is not None


def is_numbered_train(name: str) -> bool:
    """Whether it is one of several folders to train on, as train2; train_masks may be something else."""
    return re.fullmatch(_TRAIN + r"[-_.]?\d+", name, re.I) is not None


def is_other(name: str) -> bool:
    """Whether it is the name of another split, as in test.jsonl."""
    return re.fullmatch(_OTHER + _END, name, re.I) is not None


def validation_of(names: Iterable[str]) -> str:
    """The one of other splits to evaluate on during a run: val, if there is one, and a test split last."""
    return min(names, key=lambda name: (name != "val", name.lower().startswith("test"), name))


def are_splits(names: Iterable[str]) -> bool:
    """Whether these folders are splits, among them one to train on and one not to."""
    found = list(names)
    return all(is_train(n) or is_other(n) for n in found) and len({is_train(n) for n in found}) == 2


def held_out(files: Sequence[str]) -> list[str]:
    """Of files that are read together those named after another split, or in a folder that is, where others
    are named after that of training.
    """
    if not files:
        return []
    base = PurePath(os.path.commonpath(files))
    splits = {file: _split_part(PurePath(file).relative_to(base)) for file in files}
    if not any(map(is_train, splits.values())):
        return []
    return [file for file, split in splits.items() if is_other(split)]


def _split_part(path: PurePath) -> str:
    """The first part of a path that names a split; empty if none does."""
    return next((part for part in path.parts if is_train(part) or is_other(part)), "")


def held_out_line(files: Sequence[str]) -> str:
    """What a start says of them."""
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0]}{more}: held out, as the name says, and nothing else"
