"""text: UTF-8 bytes as tokens, a vocabulary of 256: text files, or the sources of Python's standard library.
synthetic: random images or tokens, for measurements, of which a model can only memorise the labels.

--data.dir is a file or a folder. In a folder every text file is read, in the order of names, up to max_mb:
UTF-8 with or without a byte order mark, UTF-16 with one. Hidden files and binary ones (a zero byte near the
beginning) are skipped, and counted in the log. Files named after another split are held out, up to a bound;
without any every tenth file is, or, if those are too short, the last tenth of the text.

The library's bytes differ between versions of Python (and a distribution may omit files):
facts["fingerprint"] identifies them, so that a run that resumes under another Python, on other samples, is
detected. A synthetic sample is a slice of one table of noise, at a position derived from its index: producing
one costs a copy.
"""

from __future__ import annotations

import codecs
import fnmatch
import hashlib
import logging
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fsdp.base.errors import ConfigError
from fsdp.base.text import quoted
from fsdp.data.cursor import mix, stream_key
from fsdp.data.types import DataInfo, DataSet, Where, check_range, shifted, text_info

log = logging.getLogger(__name__)
# Tests are long lists of data; site-packages depends on what is installed.
SKIPPED = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"}
)
SOURCES = "*.py"
HELD_OUT = 1 << 18
"""Bytes at most, to keep an evaluation shorter than the training."""
PROBED = 1 << 13
PLACES = 1 << 16
"""Different slices of the noise."""
IMAGE_SIZES = {"image_size": 28, "channels": 1, "num_classes": 10}


def text(where: Where, *, max_mb: float = 8.0, files: str = "*") -> DataSet:
    check_range("max_mb", max_mb, 0.001, 1000)
    root = Path(where.dir or sysconfig.get_paths()["stdlib"])
    limit = int(max_mb * 1e6)
    # A folder's sources are read as bytes, as the library's are: existing runs on them can resume.
    as_sources = not where.dir or files == SOURCES
    paths = [] if as_sources else _files(where, files)
    if paths and (named := _held_out(paths)):
        train = b"".join(_read_texts(root, [path for path in paths if str(path) not in named], limit))
        heldout = b"".join(_read_texts(root, [Path(path) for path in named], HELD_OUT))
    else:
        contents = list(_read_sources(root, limit) if as_sources else _read_texts(root, paths, limit))
        train = b"".join(text for number, text in enumerate(contents) if number % 10 != 9)
        heldout = b"".join(contents[9::10])[:HELD_OUT]
        if len(heldout) <= where.seq_len:  # the last tenth, which is at least one sample
            text = b"".join(contents)
            cut = max(0, len(text) - min(max(len(text) // 10, where.seq_len + 1), HELD_OUT))
            train, heldout = text[:cut], text[cut:]
    if min(len(train), len(heldout)) <= where.seq_len:
        raise ConfigError(
            f"text under {root} has {len(train)} bytes to train on, {len(heldout)} to hold out: no sample of "
            f"--data.seq_len {where.seq_len}.",
            "a folder with more text as --data.dir, or a shorter --data.seq_len",
        )
    fingerprint = hashlib.sha256(train + heldout).hexdigest()[:16]
    info = text_info(
        where, 256, fingerprint, masks_targets=False, default_steps=300, preprocess={"tokenizer": "bytes"}
    )
    samples = [ByteSamples(text, where.seq_len) for text in (train, heldout)]
    return DataSet(train=samples[0], heldout=samples[1], info=info)


def _held_out(paths: Sequence[Path]) -> Sequence[str]:
    from fsdp.tokenize.rows import held_out, held_out_line

    if named := held_out([str(path) for path in paths]):
        log.info("text: %s", held_out_line(named))
    return named


def _read_sources(root: Path, limit: int) -> Iterator[bytes]:
    """Every .py file below, ordered by name, independent of the file system."""
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in SKIPPED)
        for path in (Path(folder, name) for name in sorted(files) if name.endswith(".py")):
            if path.exists():  # no link to nothing, such as an editor's lock
                text = path.read_bytes()[:limit]
                limit -= len(text)
                yield text
                if not limit:
                    return


def _files(where: Where, pattern: str) -> list[Path]:
    root = Path(where.dir)
    if not root.exists():
        raise ConfigError(f"{where} is neither a file nor a folder.", f"ls {quoted(root.parent)}")
    if root.is_file():
        return [root]
    from fsdp.tokenize.rows import files_below

    # In the order of a walk: a folder's own files before those of the folders in it.
    paths = sorted(files_below(root), key=lambda path: (path.parent.parts, path.name))
    return [path for path in paths if fnmatch.fnmatch(path.name, pattern)]


def _read_texts(root: Path, paths: Sequence[Path], limit: int) -> Iterator[bytes]:
    left, read, binary = limit, 0, 0
    for path in paths:
        text = _read_text(path, left, alone=path == root)
        binary += text is None
        if text is not None:
            read, left = read + 1, left - len(text)
            yield text
        if not left:
            log.info("text: %g MB of %s are read; --data.args.max_mb 1000 reads more", limit / 1e6, root)
            break
    if not read:
        raise ConfigError(f"{root} has no text file; {binary} are binary.", f"ls -a {quoted(root)}")
    log.info("text: %d files, %s bytes of %s; %d binary left out", read, f"{limit - left:,}", root, binary)


def _read_text(path: Path, limit: int, *, alone: bool) -> bytes | None:
    """Returns at most `limit` bytes of UTF-8, or None for a binary file of a folder."""
    with path.open("rb") as file:
        raw = file.read(2 * limit + 4)  # UTF-16 has at least a byte of UTF-8 for two of them
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return raw.decode("utf-16", "replace").encode()[:limit]
    if b"\0" in raw[:PROBED] and not alone:
        return None
    # A character cut in two by the limit is not an error of the file.
    raw, complete = raw[: limit + 4], len(raw) <= limit + 4
    try:
        decoded = codecs.getincrementaldecoder("utf-8-sig")().decode(raw, final=complete)
    except UnicodeDecodeError:
        decoded = "\0"
    if "\0" in decoded:
        from fsdp.tokenize.rows import checked_text

        decoded = checked_text(raw, path)
    return decoded.encode()[:limit]


class ByteSamples:
    """Adjacent windows: the last target of one is the first input of the next."""

    def __init__(self, text: bytes, seq_len: int) -> None:
        self._bytes = np.frombuffer(text, np.uint8)
        self._offsets = np.arange(seq_len + 1)
        self.seq_len = seq_len

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self.seq_len

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        return shifted(self._bytes[indices[:, None] * self.seq_len + self._offsets])


# ---------------------------------------------------------------- synthetic


def synthetic(
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
    """Sizes that are not given are the model's."""
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
    known = {name: where.model_facts[name] for name in sizes if name in where.model_facts}
    known |= {name: value for name, value in sizes.items() if value}
    if wrong := [name for name in known if (name == "vocab_size") != (kind == "tokens")]:
        other = "tokens" if kind == "images" else "images"
        raise ConfigError(
            f"--data.args.{wrong[0]} {known[wrong[0]]} has no effect on {kind}.", f"--data.args.kind {other}"
        )
    facts = {"vocab_size": 256, "seq_len": where.seq_len, **known}
    more: dict[str, Any] = {"tokens_per_sample": where.seq_len, "masks_targets": False}
    if kind == "images":
        facts = {**IMAGE_SIZES, **known}
        half = (0.5,) * facts["channels"]
        preprocess = {
            "image_size": facts["image_size"],
            "channels": facts["channels"],
            "mean": half,
            "std": half,
        }
        classes = tuple(f"class {n}" for n in range(facts["num_classes"]))
        more = {"class_names": classes, "preprocess": preprocess}
    info = DataInfo(kind="images" if kind == "images" else "text", facts=facts, default_steps=20, **more)
    parts = [Noise(facts, name, count) for name, count in (("train", samples), ("heldout", heldout))]
    return DataSet(train=parts[0], heldout=parts[1] if heldout else None, info=info)


class Noise:
    """Images if `facts` have their size, else tokens."""

    def __init__(self, facts: dict[str, int], name: str, count: int) -> None:
        self.count, self._classes = count, facts.get("num_classes")
        self._place_key, self._label_key = stream_key(name, "place"), stream_key(name, "label")
        generator = np.random.Generator(np.random.Philox(key=stream_key("synthetic")))
        self._shape: tuple[int, ...]
        self._noise: np.ndarray
        if self._classes is None:
            self._shape = (facts["seq_len"] + 1,)
            self._noise = generator.integers(0, facts["vocab_size"], facts["seq_len"] + 1 + PLACES)
        else:
            self._shape = facts["channels"], facts["image_size"], facts["image_size"]
            self._noise = generator.standard_normal(int(np.prod(self._shape)) + PLACES, dtype=np.float32)

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        numbers = indices.astype(np.uint64)
        slices = np.empty((len(indices), *self._shape), self._noise.dtype)
        places = (mix(numbers, self._place_key) % np.uint64(PLACES)).astype(np.int64)
        for out, place in zip(slices, places, strict=True):
            out.reshape(-1)[:] = self._noise[place : place + out.size]
        if self._classes is None:
            return shifted(slices)
        labels = mix(numbers, self._label_key) % np.uint64(self._classes)
        return {"inputs": torch.from_numpy(slices), "targets": torch.from_numpy(labels.astype(np.int64))}
