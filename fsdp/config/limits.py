"""Reads configuration files within limits that are far above any real one: size, depth, parts of a key.

A configuration may be a stranger's (docs/security.md). Without the limits, a short file could take all
memory, or end a later reader of its values in a RecursionError. Not here: what a file means (reading.py).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fsdp.base.regular_file import read_regular
from fsdp.base.units import byte_size

MOST_BYTES = 1 << 20
MOST_LEVELS = 32
"""Of tables and lists in one another, and parts of one key `a.b.c`."""
LONGEST_NUMBER = 1 << 1024
"""Text of longer whole numbers cannot be made above 4,300 digits; a float holds none of them."""
_KEY = r"""(?:[A-Za-z0-9_-]++|"(?:\\.|[^"\\\n])*+"?|'[^'\n]*+'?)"""
_TOKEN = re.compile(
    # a comment, the two kinds of long strings, and keys with their dots; values look like keys of one part
    r'#[^\n]*+|"""(?:\\.|[^\\])*?(?:"{3,5}|\Z)'
    rf"|'''.*?(?:'{{3,5}}|\Z)|(?P<key>{_KEY}(?:[ \t]*+\.[ \t]*+{_KEY})*+)",
    re.DOTALL,
)
_PART = re.compile(_KEY, re.DOTALL)


class OddFile(ValueError):
    """A file that is no configuration, whatever its format: its message continues "FILE cannot be used: "."""


def read_limited(path: Path, *, pipes: bool = False) -> bytes:
    """The file's bytes. Raises OSError, and OddFile for one that is too large or, without `pipes`, is no
    regular file.
    """
    if not pipes:
        try:
            return read_regular(path, MOST_BYTES)
        except ValueError as error:
            raise OddFile(str(error)) from None
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    check_size(len(data))
    return data


def check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise OddFile(f"it has more than {byte_size(MOST_BYTES)}")


def parse_toml(text: str) -> dict[str, Any]:
    """Raises OddFile for keys or values that are too deep, ValueError or RecursionError for no TOML."""
    check_keys(text)
    tree = tomllib.loads(text)
    check_values(tree)
    return tree


def check_keys(text: str) -> None:
    """Before tomllib sees them: it takes memory with the square of a key's parts."""
    for token in _TOKEN.finditer(text):
        key = token["key"] or ""
        if key.count(".") >= MOST_LEVELS and len(_PART.findall(key)) > MOST_LEVELS:
            raise OddFile(f"a key has more than {MOST_LEVELS} parts")


def check_values(tree: Any) -> None:
    """Raises OddFile for values that are too deep, or too long to be shown."""
    level, levels = [tree], 0
    while level:
        if levels > MOST_LEVELS:
            raise OddFile(f"values are nested more than {MOST_LEVELS} levels deep")
        if any(isinstance(one, int) and abs(one) > LONGEST_NUMBER for one in level):
            raise OddFile("a whole number has more than 300 digits")
        level, levels = [one for value in level for one in _within(value)], levels + 1


def _within(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple, set)) else ()
