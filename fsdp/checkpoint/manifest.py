"""The manifest: a checkpoint's contents with the checksum of every file. Written last, it is the seal.

It is plain JSON with a checksum of itself. It repeats the counters: from the other files only tensors and
optimizer state are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any
from zlib import crc32

from fsdp.base.errors import CheckpointError
from fsdp.base.text import checked_count

FORMAT = 2
"""1: no `head`, which was 1024."""
MOST_BYTES = 128 << 20
"""A larger one is not read: 16,384 ranks have a megabyte of files, a million tensors 100 MB of digests."""
LONGEST_TEXT = 4096
"""A path, at most."""
LATEST = 2.0**40
"""Seconds since 1970: 36,000 years."""


class Broken(Exception):
    """A checkpoint is not whole. `why`, a word or two, becomes part of its name when it is set aside."""

    def __init__(self, why: str, detail: str) -> None:
        self.why, self.detail = why, detail
        super().__init__(why, detail)  # both arguments: it is pickled and sent to other ranks

    def __str__(self) -> str:
        return f"{self.why}: {self.detail}"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    step: int
    attempt: str
    created: float
    torch: str
    strategy: str
    replicate: int
    shard: int
    ranks: int
    config: str
    reason: str
    counters: Mapping[str, float | int]
    metrics: Mapping[str, float]
    files: Mapping[str, tuple[int, int]]
    """Name → size and crc32 of every file but the manifest."""
    digests: Mapping[str, tuple[int, str]]
    """Key of each tensor → its number of elements and the digest of its bits, in hex."""
    bytes: int = 0
    head: int = 1024
    """The bytes of a tensor's frame before its data."""
    base: Mapping[str, Any] = field(default_factory=dict)
    """In a checkpoint of adapters alone: the frozen weights under them."""
    optimizer: str = ""
    """--optim.name of its states; empty in older checkpoints."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The position of a mixture or a stream; checked by the reader (fsdp/data)."""

    @property
    def mesh(self) -> str:
        return f"{self.strategy} {self.replicate}×{self.shard}"


def encode(manifest: Manifest) -> bytes:
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, sort_keys=True, ensure_ascii=False)
    return f'{{"crc32": {crc32(text.encode()):10d}, "manifest":\n{text}}}\n'.encode()


def decode(data: bytes) -> Manifest:
    """The manifest; Broken if a byte of it is not what was written."""
    head, newline, rest = data.partition(b"\n")
    text = rest[:-2]
    try:
        expected = int(json.loads(head + b"0}")["crc32"])
        if not newline or rest[-2:] != b"}\n" or crc32(text) != expected:
            raise ValueError("its checksum differs")
        body = json.loads(text)
        form, step = body.pop("format"), body.get("step")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Broken("manifest", f"the manifest cannot be read ({error})") from None
    if form not in (1, FORMAT):
        # It may be whole: it is not set aside.
        raise CheckpointError(
            f"a checkpoint of step {step!a:.40} has format {form!a:.40}; this program reads format {FORMAT}.",
            "resume with the version of this program that wrote it, or a newer one",
        )
    try:
        if unknown := body.keys() - {entry.name for entry in fields(Manifest)}:
            raise ValueError(f"{min(unknown)!a:.40} is no field of it")
        return _checked(Manifest(**body))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise Broken(
            "manifest", f"the manifest has another form than this program writes ({error})"
        ) from None


def _checked(sealed: Manifest) -> Manifest:
    """The manifest with the type of each field checked: the file may come from anywhere."""
    for entry in fields(Manifest):
        _CHECKS.get(str(entry.type), _mapping)(entry.name, getattr(sealed, entry.name))
    for number in (*sealed.counters.values(), *sealed.metrics.values()):
        _number("a number", number)
    if not 0 <= sealed.created < LATEST:
        raise ValueError(f"created {sealed.created!a} is no time of a save")
    if base := sealed.base:
        for name, check in (("digest", _text), ("origin", _text), ("alpha", _number), ("rank", _count)):
            check(f"base.{name}", base[name])
    files = {
        _file_name(name): (checked_count(size), checked_count(crc))
        for name, (size, crc) in sealed.files.items()
    }
    digests = {
        key: (checked_count(numel), f"{int(value, 16):016x}")
        for key, (numel, value) in sealed.digests.items()
    }
    return replace(sealed, files=files, digests=digests)


def _file_name(name: str) -> str:
    """The manifest may be a stranger's: no path leads out, and the system accepts the name."""
    if name in (".", "..") or "/" in name or "\0" in name or len(name.encode()) > 255:
        raise ValueError(f"{name!a:.40} is no name of a file")
    return name


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        raise ValueError(f"{name} is not a string of up to {LONGEST_TEXT} characters")
    if (
        name not in ("reason", "base.origin") and not value.isprintable()
    ):  # the log would give a terminal its escape sequences
        raise ValueError(f"{name} has control characters")


def _number(name: str, value: Any) -> None:
    """An int or a float; NaN is allowed, for metrics."""
    if type(value) is not float and not (type(value) is int and abs(value) < 2**63):
        raise ValueError(f"{name}: {value!a:.40} is not a number")


def _mapping(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise TypeError(f"{name} is not an object")


def _count(name: str, value: Any) -> None:
    checked_count(value)


_CHECKS = {"str": _text, "int": _count, "float": _number}
"""By the type of a field."""
