"""Files and folders named after a split of the data: train, val, test."""

from __future__ import annotations

import re
from collections.abc import Iterable
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


def shell_patterns(names: Iterable[str]) -> list[str]:
    """Patterns of a shell that match those names of splits, and names of the same splits alone."""
    words = (re.fullmatch(rf"({_TRAIN}|{_OTHER}){_END}", name, re.I) for name in names)
    return sorted({f"{word[1]}[-_.0-9]*" for word in words if word})


def split_part(path: PurePath) -> str:
    """The first part of a path that names a split; empty if none does."""
    return next((part for part in path.parts if is_train(part) or is_other(part)), "")
