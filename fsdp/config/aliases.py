"""Settings of other trainers and their flags here: the rows of aliases.md, and the search in them.

Used for hints, before similar spellings, and for migration. Not here: files of other trainers
(foreign_files.py).
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PAGE = Path(__file__).with_name("aliases.md")
VALUE = "VALUE"
"""Stands for the typed value in a row; VALUE[0] for the first item of a list."""
NO_COUNTERPART = "no counterpart"
"""How a reason begins if nothing here does what the name did."""
_MOST_PARTS = 8
"""Of a name that is looked up: the search grows with their square."""
_PLACE = re.compile(rf"{VALUE}(?:\[(\d)\])?")
_OF_A_TYPE = re.compile(r"^(shardingstrategy|backwardprefetch|torch|distributedtype)\.")


@dataclass(frozen=True)
class Alias:
    """`flags` replace `names`; `values` holds exceptions for certain values.

    Text that does not begin with -- is the reason why there is no flag.
    """

    names: tuple[str, ...]
    flags: str
    values: Mapping[str, str] = field(default_factory=dict)

    def hint(self, value: str) -> str:
        items = re.split(r"[,\s]+", value.strip("[]() "))

        def typed(place: re.Match[str]) -> str:
            if place[1] is None:
                return shlex.quote(value or VALUE)
            at = int(place[1])
            return (items[at] if at < len(items) else "") or VALUE

        return _PLACE.sub(typed, self.values.get(_key(value), self.flags))

    def is_exception(self, value: str) -> bool:
        return _key(value) in self.values


def _key(value: str) -> str:
    """A flag without a value is `true`."""
    return _OF_A_TYPE.sub("", value.lower()) or "true"


@functools.cache
def rows() -> tuple[Alias, ...]:
    """All rows of the page."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return tuple(_row(line) for line in lines if line.startswith("| `"))


def _row(line: str) -> Alias:
    names, flags, by_value = (cell.strip() for cell in line.strip("|").split("|"))
    return Alias(tuple(names.replace("`", "").split(", ")), flags.strip("`"), _by_value(by_value))


def _by_value(cell: str) -> dict[str, str]:
    """Of `VALUE, VALUE → TEXT; VALUE → TEXT`, where a text may have a semicolon of its own."""
    keys, *rest = cell.split(" → ")
    found: dict[str, str] = {}
    for part in rest:
        text, _, others = part.rpartition("; ") if part is not rest[-1] else (part, "", "")
        found |= dict.fromkeys(keys.split(", "), text.strip("`"))
        keys = others
    return found


@functools.cache
def _by_name() -> Mapping[str, Alias]:
    return {name: alias for alias in rows() for name in alias.names}


def hint_for(name: str, value: str) -> str | None:
    """Returns our flags for another trainer's setting, or why there is none; None if it is unknown."""
    alias = alias_of(name)
    return alias.hint(value) if alias is not None else None


def alias_of(name: str) -> Alias | None:
    """The row of `section.name`: of the longest part of it that ends it, else of the section around it."""
    parts = name.lower().split(".")[-_MOST_PARTS:]
    ends = [".".join(parts[at:]) for at in range(len(parts))]
    around = [f"{'.'.join(parts[at:stop])}.*" for stop in range(len(parts) - 1, 0, -1) for at in range(stop)]
    known = _by_name()
    return next((known[one] for one in (*ends, *around) if one in known), None)


def sharding(word: str) -> str | None:
    """Our flags for FSDP1's ShardingStrategy by name and number, ZeRO's stages and Lightning's strategies."""
    key = _key(word)
    return None if key in ("true", "no") else _by_name()["sharding_strategy"].values.get(key)


def is_flags(hint: str) -> bool:
    """Whether the hint is flags with their values, which can be typed."""
    try:
        words = shlex.split(hint)
    except ValueError:  # an apostrophe of a sentence
        return False
    return bool(words) and len(words) % 2 == 0 and all(word.startswith("--") for word in words[::2])
