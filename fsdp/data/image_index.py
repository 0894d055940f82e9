"""The list of very many image files: made once a machine in the cache, mapped by every rank.

A start compares the times of the folders with those in the index; a folder's time changes when a name is
added, removed or renamed in it. Not here: which files are images, and which are held out (folder.py).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fsdp.data.mapped_sequence import MappedSequence, PackedNames, mapped, pack
from fsdp.tokenize.cache import made_once

AT_ONCE = 100_000
Visit = Callable[[str], None]
Listed = tuple[str, int]
"""The path of an image, and its class."""


class ImagePaths(MappedSequence[str]):
    """Paths of one part of an index."""

    def __init__(self, part: Path, root: str) -> None:
        self._root = root
        self._names = PackedNames(mapped(part / "names", np.uint8), mapped(part / "ends", np.int64))
        self.labels = mapped(part / "labels", np.int32)
        self.fingerprint = (part / "fingerprint").read_text(encoding="utf-8")

    def __len__(self) -> int:
        return len(self._names)

    def item(self, n: int) -> str:
        return f"{self._root}/{self._names[n]}"


def indexed(
    root: Path, folders: Iterable[Path], parts: Callable[[Visit], dict[str, Iterable[Listed]]]
) -> dict[str, ImagePaths]:
    """The parts of the folder as it is now. `folders` are those that a start looks at first; `parts` calls
    its argument with every folder that it lists.
    """
    top = [[str(path), path.stat().st_mtime_ns] for path in folders]
    base = str(root)

    def make(aside: Path) -> None:
        aside.mkdir(parents=True, exist_ok=True)
        times: dict[str, int] = {}

        def visit(folder: str) -> None:
            times[folder[len(base) + 1 :]] = Path(folder).stat().st_mtime_ns

        for name, listed in parts(visit).items():
            _write_part(aside / name, base, listed)
        (aside / "folders.json").write_text(json.dumps(times), encoding="utf-8")

    for generation in itertools.count():  # a change deeper down leaves the times of `top` as they are
        place = made_once("images", [3, str(root.resolve()), top, generation], make)
        if _unchanged(base, place):
            return {one.name: ImagePaths(one, base) for one in place.iterdir() if one.is_dir()}
    raise AssertionError("not reached")


def _unchanged(base: str, place: Path) -> bool:
    times = json.loads((place / "folders.json").read_text(encoding="utf-8"))
    try:
        return all(Path(base, name).stat().st_mtime_ns == time for name, time in times.items())
    except OSError:
        return False


def _write_part(part: Path, base: str, listed: Iterable[Listed]) -> None:
    """Written in pieces: all of them may be more than memory holds."""
    part.mkdir(exist_ok=True)
    source, end, digest = iter(listed), 0, hashlib.sha256()
    with (
        (part / "names").open("wb") as names,
        (part / "ends").open("wb") as ends,
        (part / "labels").open("wb") as labels,
    ):
        while chunk := list(itertools.islice(source, AT_ONCE)):
            raw, lengths = pack([path[len(base) + 1 :] for path, _ in chunk])
            names.write(raw)
            ends.write((end + np.cumsum(lengths)).astype("<i8").tobytes())
            labels.write(np.array([label for _, label in chunk], "<i4").tobytes())
            end += len(raw)
            digest.update(_lines(base, chunk))
    (part / "fingerprint").write_text(_shortened(digest), encoding="utf-8")


def fingerprint(base: str, listed: Iterable[Listed]) -> str:
    """As the index of the same images has it: changes with a name or a class."""
    return _shortened(hashlib.sha256(_lines(base, listed)))


def _lines(base: str, listed: Iterable[Listed]) -> bytes:
    return b"".join(b"%d %s\n" % (label, os.fsencode(path[len(base) + 1 :])) for path, label in listed)


def _shortened(digest: Any) -> str:
    return str(digest.hexdigest())[:16]
