"""text: UTF-8 bytes as tokens, a vocabulary of 256: text files, or the sources of Python's standard library.

--data.dir is a file or a folder. In a folder every text file is read, in the order of names, up to max_mb:
UTF-8 with or without a byte order mark, UTF-16 with one. Hidden files and binary ones (a zero byte near the
beginning) are skipped, and counted in the log. Files named after another split are held out, up to a bound;
without any every tenth file is, or, if those are too short, the last tenth of the text.

The library's bytes differ between versions of Python (and a distribution may omit files):
facts["fingerprint"] identifies them, so that a run that resumes under another Python, on other samples, is
detected.
"""

from __future__ import annotations

import codecs
import fnmatch
import hashlib
import logging
import os
import shlex
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch import Tensor

from fsdp.base.errors import ConfigError
from fsdp.data.arguments import Where, check_range
from fsdp.data.next_token import shifted
from fsdp.data.types import DataInfo, DataSet
from fsdp.tokenize.file_names import unreadable
from fsdp.tokenize.sources import LINES, ends_with
from fsdp.tokenize.split_names import held_out, held_out_line
from fsdp.tokenize.zero_bytes import binary_kind, check_no_zero_byte, encoding_of, not_decodable

log = logging.getLogger(__name__)

# Tests are long lists of data; site-packages depends on what is installed.
SKIPPED = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"}
)
SOURCES = "*.py"

HELD_OUT = 1 << 18  # bytes at most, to keep an evaluation shorter than the training
PROBED = 1 << 13
UTF_16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


def build(where: Where, *, max_mb: float = 8.0, files: str = "*") -> DataSet:
    check_range("max_mb", max_mb, 0.001, 1000)
    root = Path(where.dir or sysconfig.get_paths()["stdlib"])
    limit = int(max_mb * 1e6)
    # A folder's sources are read as bytes, as the library's are: existing runs on them can resume.
    as_sources = not where.dir or files == SOURCES
    paths = [] if as_sources else list(_files(where, files))
    if named := held_out([str(path) for path in paths]):
        log.info("text: %s", held_out_line(named))
        of_train = [path for path in paths if str(path) not in named]
        train = b"".join(_read_texts(where, of_train, files, limit))
        heldout = b"".join(_read_texts(where, [Path(one) for one in named], files, HELD_OUT))
    else:
        contents = list(_read(root, limit) if as_sources else _read_texts(where, paths, files, limit))
        train = b"".join(text for place, text in enumerate(contents) if place % 10 != 9)
        heldout = b"".join(text for place, text in enumerate(contents) if place % 10 == 9)[:HELD_OUT]
        if len(heldout) <= where.seq_len:
            train, heldout = _cut(b"".join(contents), where.seq_len)
    for split, text in (("train on", train), ("hold out", heldout)):
        if len(text) <= where.seq_len:
            raise ConfigError(
                f"text under {root} has {len(text)} bytes to {split}, no sample of --data.seq_len "
                f"{where.seq_len}.",
                "a folder with more text as --data.dir, or a shorter --data.seq_len",
            )
    fingerprint = hashlib.sha256(train + heldout).hexdigest()[:16]
    info = DataInfo(
        kind="text",
        facts={"vocab_size": 256, "seq_len": where.seq_len, "fingerprint": fingerprint},
        tokens_per_sample=where.seq_len,
        masks_targets=False,
        default_steps=300,
        preprocess={"tokenizer": "bytes"},
    )
    return DataSet(
        train=ByteSamples(train, where.seq_len), heldout=ByteSamples(heldout, where.seq_len), info=info
    )


def _cut(text: bytes, seq_len: int) -> tuple[bytes, bytes]:
    """Splits off the last tenth, which is at least one sample."""
    held = min(max(len(text) // 10, seq_len + 1), HELD_OUT)
    place = max(0, len(text) - held)
    return text[:place], text[place:]


# ---------------------------------------------------------------- Python's sources


def _read(root: Path, limit: int) -> Iterator[bytes]:
    for path in _sources(root):
        try:
            text = path.read_bytes()[:limit]
        except FileNotFoundError:
            continue  # a link to nothing, such as an editor's lock
        except OSError as error:
            raise unreadable(error, path) from None
        limit -= len(text)
        yield text
        if not limit:
            return


def _sources(root: Path) -> Iterator[Path]:
    """Yields every .py file below, ordered by name, independent of the file system."""
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in SKIPPED)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


# ---------------------------------------------------------------- any text files


def _read_texts(where: Where, paths: list[Path], pattern: str, limit: int) -> Iterator[bytes]:
    root, left, read = Path(where.dir), limit, 0
    rows: list[Path] = []
    binary: list[Path] = []
    for path in paths:
        text = _read_text(path, left, where)
        if text is None:
            binary.append(path)
            continue
        read, left = read + 1, left - len(text)
        if root.is_dir() and pattern == "*" and ends_with(path.name, LINES):
            rows.append(path)
        yield text
        if not left:
            log.info(
                "text: the first %g MB of %s are read. HINT: --data.args.max_mb 1000 reads more",
                limit / 1e6,
                root,
            )
            break
    if not read:
        raise _no_text(where, pattern, binary)
    if rows:
        log.warning(
            "text: %d of %d files hold rows, as %s, and are read as text. HINT: --data.name documents "
            "--data.dir %s reads the rows alone",
            len(rows),
            read,
            rows[0],
            shlex.quote(where.dir),
        )
    left_out = f"; {len(binary)} binary left out, as {binary[0]}" if binary else ""
    log.info("text: %d files, %s bytes of %s%s", read, f"{limit - left:,}", root, left_out)


def _no_text(where: Where, pattern: str, binary: list[Path]) -> ConfigError:
    kinds = f" of --data.args.files {pattern}" if pattern != "*" else ""
    found, hint = "", f"ls -a {shlex.quote(where.dir)}"
    if binary:
        with binary[0].open("rb") as file:
            what, hint = binary_kind(file.read(PROBED), binary[0]) or ("binary", hint)
        found = f"; {binary[0]} is {what}"
    return ConfigError(f"{where} has no text file{kinds}{found}.", hint)


def _files(where: Where, pattern: str) -> Iterator[Path]:
    root = Path(where.dir)
    if root.is_file():
        yield root
        return
    if not root.is_dir():
        raise ConfigError(f"{where} is neither a file nor a folder.", f"ls {root.parent}")
    for folder, names, files in os.walk(root, onerror=_refuse):
        names[:] = sorted(name for name in names if not name.startswith(".") and name != "lost+found")
        wanted = sorted(name for name in files if not name.startswith(".") and fnmatch.fnmatch(name, pattern))
        yield from (Path(folder, name) for name in wanted)


def _refuse(error: OSError) -> None:
    raise unreadable(error, "a folder")


def _read_text(path: Path, limit: int, where: Where) -> bytes | None:
    """Returns at most `limit` bytes of UTF-8, or None for a binary file of a folder."""
    try:
        with path.open("rb") as file:
            raw = file.read(limit + 4)
            if raw[:2] in UTF_16:  # at least a byte of UTF-8 for two of them
                raw += file.read(limit)
            whole = not file.read(1)
    except OSError as error:
        raise unreadable(error, path) from None
    one = Path(where.dir).is_file()
    # A mark of UTF-32 begins as that of UTF-16.
    encoding = "utf-8" if encoding_of(raw) == "utf-32" else UTF_16.get(raw[:2], "utf-8")
    if encoding == "utf-8":
        if b"\0" in raw[:PROBED] and not one:
            return None
        check_no_zero_byte(raw, path, str(where if one else path))
    try:
        # A character cut in two by the limit is not an error of the file.
        text = codecs.getincrementaldecoder(encoding)().decode(raw, final=whole)
    except UnicodeDecodeError as error:
        others = "" if one else "; or --data.args.files '*.txt' reads only those"
        raise not_decodable(error, raw, path, str(path), encoding=encoding, more=others) from None
    return text.removeprefix("\ufeff").encode()[:limit]


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
