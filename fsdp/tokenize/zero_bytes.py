"""Zero bytes in a file that is read as UTF-8: which encoding it looks like, and the line that mends it."""

from __future__ import annotations

import codecs
from pathlib import Path

from fsdp.base.errors import ConfigError
from fsdp.tokenize.file_names import shell_word

MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
"""The first mark that fits counts: that of UTF-32 begins as one of UTF-16."""
WITHOUT_MARK = ("utf-32le", "utf-32be", "utf-16le", "utf-16be")
GZIP = b"\x1f\x8b"
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
    encoding, file = encoding_of(raw), shell_word(path)
    if raw.startswith(GZIP):
        plain = shell_word(path.with_suffix(".txt" if path.suffix != ".gz" else ""))
        return ConfigError(f"{name} is compressed.", f"zcat {file} > {plain}; --data.name {plain}")
    if encoding:
        return ConfigError(
            f"{name} is not UTF-8: byte {place} is zero, and it looks like {encoding.upper()}.",
            converting_hint(encoding, path),
        )
    new = shell_word(f"{path}.clean")
    return ConfigError(
        f"{name} is not text: byte {place} is zero.",
        f"another file; for text with stray zero bytes, tr -d '\\000' < {file} > {new} && mv {new} {file}",
    )


def converting_hint(encoding: str, path: Path) -> str:
    """The shell command that makes the file one of UTF-8."""
    file, new = shell_word(path), shell_word(f"{path}.utf8")
    return f"iconv -f {encoding} -t utf-8 {file} > {new} && mv {new} {file}"
