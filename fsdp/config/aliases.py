"""The search for another trainer's setting among the rows of alias_table.py, alias_models.py and
alias_scripts.py.

Used for hints, before similar spellings, and for migration. docs/migrate.md prints the same rows;
tests/config/test_aliases.py compares the two.
"""

from __future__ import annotations

import shlex

from fsdp.config import alias_table
from fsdp.config.alias_models import MODELS
from fsdp.config.alias_scripts import SCRIPTS
from fsdp.config.alias_table import SHARDING, VALUE, Alias

__all__ = ["ALIASES", "GROUPS", "SHARDING", "VALUE", "Alias", "alias_of", "hint_for", "is_flags", "table"]

GROUPS = {
    **alias_table.GROUPS,
    "Models; nanoGPT, torchtune, Axolotl": MODELS,
    "Megatron-LM, NeMo, LLaMA-Factory, example scripts": SCRIPTS,
}
"""By subject, in the order of docs/migrate.md."""
ALIASES = tuple(alias for group in GROUPS.values() for alias in group)
_BY_NAME = {name: alias for alias in ALIASES for name in alias.names.split()}


def hint_for(name: str, value: str) -> str | None:
    """Returns our flags for another trainer's setting, or why there is none; None if it is unknown."""
    alias = alias_of(name)
    return alias.hint(value) if alias is not None else None


def alias_of(name: str) -> Alias | None:
    """The row of `section.name`: of the longest part of it that ends it, else of the section around it."""
    parts = name.lower().split(".")
    ends = [".".join(parts[at:]) for at in range(len(parts))]
    around = [f"{'.'.join(parts[at:stop])}.*" for stop in range(len(parts) - 1, 0, -1) for at in range(stop)]
    return next((_BY_NAME[one] for one in (*ends, *around) if one in _BY_NAME), None)


def table() -> str:
    """The rows of docs/migrate.md, a heading and a table for each subject."""
    lines: list[str] = []
    for title, group in GROUPS.items():
        lines += [f"## {title}", "", "| elsewhere | here | by value |", "|---|---|---|"]
        lines += [*map(_row, group), ""]
    return "\n".join(lines)


def _row(alias: Alias) -> str:
    names = ", ".join(f"`{name}`" for name in alias.names.split())
    others: dict[str, list[str]] = {}
    for value, flags in alias.values.items():
        if flags != alias.flags:
            others.setdefault(_shown(flags), []).append(value or "empty")
    by_value = "; ".join(f"{', '.join(values)} → {flags}" for flags, values in others.items())
    return f"| {names} | {_shown(alias.flags)} | {by_value} |"


def _shown(flags: str) -> str:
    text = flags.replace("{0}", "FIRST").replace("{1}", "SECOND").replace(VALUE, "VALUE")
    return f"`{text}`" if is_flags(text) else text


def is_flags(hint: str) -> bool:
    """Whether the hint is flags with their values, which can be typed."""
    try:
        words = shlex.split(hint)
    except ValueError:  # an apostrophe of a sentence
        return False
    return bool(words) and len(words) % 2 == 0 and all(word.startswith("--") for word in words[::2])
