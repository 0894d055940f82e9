"""Bars cut into kinds, one a rank: what memory or time went to. Without scripts, and readable beside its
numbers.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence

from fsdp.report.curves import COLOURS

Bars = Mapping[str, Mapping[str, float]]
"""Name of a bar → kind → how much."""


def bars(
    rows: Bars, kinds: Sequence[str], say: Callable[[float], str], words: Mapping[str, str] | None = None
) -> str:
    """A key, then a bar each, all on the scale of the longest. `words` say a kind to people."""
    most = max((sum(parts.values()) for parts in rows.values()), default=0.0) or 1.0
    words = words or {}
    key = "".join(
        f'<span><i class="c{nth % COLOURS}"></i>{html.escape(words.get(kind, kind))}</span>'
        for nth, kind in enumerate(kinds)
    )
    lines = "".join(_bar(name, parts, kinds, say, most) for name, parts in rows.items())
    return f'<div class="key">{key}</div><div class="bars">{lines}</div>'


def _bar(
    name: str, parts: Mapping[str, float], kinds: Sequence[str], say: Callable[[float], str], most: float
) -> str:
    cut = "".join(
        f'<i class="c{nth % COLOURS}" style="width:{parts[kind] / most * 100:.2f}%" '
        f'title="{html.escape(kind)} {say(parts[kind])}"></i>'
        for nth, kind in enumerate(kinds)
        if parts.get(kind, 0) > 0
    )
    total = say(sum(parts.values()))
    return f'<div class="row"><span>{html.escape(name)}</span><span class="bar">{cut}</span><span>{total}</span></div>'


def chosen(ranks: Sequence[int], most_telling: Sequence[int], shown: int = 16) -> list[int]:
    """Ranks that get a row where there are many: the first ones, and those that tell most."""
    return sorted({*list(ranks)[: shown // 2], *list(most_telling)[: shown // 2]})
