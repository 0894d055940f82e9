"""Counts, lists and tables as text, for messages, logs and terminals; control characters escaped.

Not here: numbers with a unit (units.py), tables of pages (html.py).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F]
_CONTROLS += [*range(0x2028, 0x202F), *range(0x2066, 0x206A)]
_SURROGATES = range(0xD800, 0xE000)
"""Of names that are no UTF-8; a stream decides by itself what it writes for them."""
_ESCAPES = {code: repr(chr(code))[1:-1] for code in [*_CONTROLS, *_SURROGATES]}
_IN_LINES = {code: _ESCAPES[code] for code in _CONTROLS if chr(code) not in "\t\n"}


def printable(text: str) -> str:
    """The text with escapes for what a terminal obeys: control characters and those that reorder a line.

    Names and values of a run directory, a store or a foreign file are in messages, and a terminal's escape
    sequences in them could rewrite the screen, its title or its clipboard. Line breaks and tabs stay.
    """
    return text.translate(_IN_LINES)


def printable_line(text: object) -> str:
    """As `printable`, with line breaks and tabs escaped too: a name cannot add a line of its own."""
    return str(text).translate(_ESCAPES)


def counted(count: int, noun: str) -> str:
    """`1 rank`, `3 ranks`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def listed(items: Sequence[object], most: int = 8) -> str:
    """`a, b and 3 more`."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


def parse_count(text: str) -> int | None:
    """Of `12` or `1_000`; None for anything else, such as `²`, which str.isdigit takes."""
    return int(text) if re.fullmatch(r"[0-9]+(_[0-9]+)*", text) and len(text) < 20 else None


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2, 5`."""
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"


def nearest(word: str, known: Iterable[str], form: str, otherwise: str, *, cutoff: float = 0.6) -> str:
    """`form` with the most similar of `known` words for its {}, or `otherwise`: for hints."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return form.replace("{}", found[0]) if found else otherwise


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """A line for each row, its cells aligned to the left, in the columns `right` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
