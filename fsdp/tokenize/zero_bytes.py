"""Zero bytes in a file that is read as UTF-8: what it looks like, and the line that fixes it."""

from __future__ import annotations

import codecs
from pathlib import Path

from fsdp.base.commands import quoted
from fsdp.base.errors import ConfigError

MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
"""The first mark that fits counts: that of UTF-32 begins as one of UTF-16."""
WITHOUT_MARK = ("utf-32le", "utf-32be", "utf-16le", "utf-16be")
PACKED = {b"\x1f\x8b": "zcat", b"BZh": "bzcat", b"\xfd7zXZ": "xzcat", b"\x28\xb5\x2f\xfd": "zstdcat"}
"""First bytes of a compressed file, and the command that writes its contents."""
PACKED_NAMES = (".gz", ".bz2", ".xz", ".zst")
PICTURES = (b"\x89PNG", b"\xff\xd8\xff")
ARROW = b"ARROW1"
ZIP, TAR, TAR_AT = b"PK\x03\x04", b"ustar", 257
PROBED = 1 << 16
SHORT = 16
"""Fewer bytes fit several encodings."""
SELDOM = 0.05
"""A text of UTF-8 with a smaller share of zero bytes has them by accident."""


def encoding_of(raw: bytes) -> str:
    """The encoding that the first bytes look like, as iconv names it; empty if it is none of UTF-16 or 32."""
    for mark, name in MARKS.items():
        if raw.startswith(mark):
            return name
    part = raw[:PROBED]
    stray = part.count(0) < SELDOM * len(part) and _decodes(part, "utf-8")
    if b"\0" not in part or len(part) < SHORT or stray:
        return ""
    return next((name for name in WITHOUT_MARK if _zeros_fit(part, name) and _decodes(part, name)), "")


def _zeros_fit(part: bytes, encoding: str) -> bool:
    """Whether no character has zero as its lowest byte."""
    width = int(encoding[4:6]) // 8
    return 0 not in part[0 if encoding.endswith("le") else width - 1 :: width]


def _decodes(part: bytes, encoding: str) -> bool:
    try:
        codecs.getincrementaldecoder(encoding)().decode(part)
    except UnicodeDecodeError:
        return False
    return True


def check_no_zero_byte(raw: bytes, path: Path, name: str) -> None:
    """Raises ConfigError with the position of the first zero byte."""
    place = raw.find(b"\0")
    if place >= 0:
        raise zero_byte_error(raw, place, path, name)


def zero_byte_error(raw: bytes, place: int, path: Path, name: str) -> ConfigError:
    encoding, file = encoding_of(raw), quoted(path)
    if kind := binary_kind(raw, path):
        return ConfigError(f"{name} is {kind[0]}.", kind[1])
    if encoding:
        return ConfigError(
            f"{name} is not UTF-8: byte {place} is zero, and it looks like {encoding.upper()}.",
            converting_hint(encoding, path),
        )
    new = quoted(f"{path}.clean")
    return ConfigError(
        f"{name} is not text: byte {place} is zero.",
        f"another file; for text with stray zero bytes, tr -d '\\000' < {file} > {new} && mv {new} {file}",
    )


def not_decodable(
    error: UnicodeDecodeError, raw: bytes, path: Path, name: str, *, encoding: str = "utf-8", more: str = ""
) -> ConfigError:
    """`more` is a second HINT, for a file that is text."""
    if kind := binary_kind(raw, path):
        return ConfigError(f"{name} is {kind[0]}.", kind[1])
    return ConfigError(
        f"{name} is not {encoding.upper()} at byte {error.start}: {error.reason}.",
        f"{converting_hint(encoding_of(raw) or 'latin1', path)}{more}",
    )


def binary_kind(raw: bytes, path: Path) -> tuple[str, str] | None:
    """What a file of another kind is, and the line that unpacks it or reads it; None if it is not known."""
    file = quoted(path)
    tool = next((tool for first, tool in PACKED.items() if raw.startswith(first)), "")
    if tool:
        plain = quoted(path.with_suffix("" if path.suffix in PACKED_NAMES else ".txt"))
        return "compressed", f"{tool} {file} > {plain}; --data.name {plain}"
    folder = quoted(path.with_suffix("") if path.suffix else f"{path}.files")
    own = f"--data.name {folder}, or a Dataset that reads it: --data.name mine:build"
    if raw.startswith(TAR, TAR_AT):
        return "a tar archive", f"mkdir -p {folder} && tar -xf {file} -C {folder}; {own}"
    if raw.startswith(ZIP):
        return "a zip archive", f"unzip {file} -d {folder}; {own}"
    if raw.startswith(ARROW):
        new = str(path.with_suffix(".parquet"))
        code = f"pyarrow.parquet.write_table(pyarrow.ipc.open_file({str(path)!r}).read_all(), {new!r})"
        take = quoted(f"import pyarrow.ipc, pyarrow.parquet; {code}")
        return "an Arrow file", f"python -c {take}; --data.name {quoted(new)}"
    if raw.startswith(PICTURES):
        return "a picture", f"--data.name FOLDER, with FOLDER/CLASS/{quoted(path.name)}"
    return None


def converting_hint(encoding: str, path: Path) -> str:
    """The shell command that makes the file one of UTF-8."""
    file, new = quoted(path), quoted(f"{path}.utf8")
    return f"iconv -f {encoding} -t utf-8 {file} > {new} && mv {new} {file}"
