"""`[[data.sources]]`: from a recipe's tables, or a file's, to MixedSource and back.

    [[data.sources]]
    name = "notes/"        name, dir, tokenizer and args as in [data]
    label = "notes"        its name in metrics; without it the last part of dir or name
    weight = 2             its proportion of samples; or epochs = 1, how often the run sees it

Not here: how sources are mixed (fsdp/data/mixing_order.py), and fields that conflict (checks.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.base.text import nearest
from fsdp.config.limits import OddFile, parse_toml, read_limited
from fsdp.config.sections import MixedSource, default_label

FLAG = "--data.sources"
TABLE = "[[data.sources]]"
_TEXTS = ("name", "dir", "tokenizer", "label")
_NUMBERS = ("weight", "epochs")
_FIELDS = tuple(field.name for field in dataclasses.fields(MixedSource))
_LABEL = re.compile(r"[\w.+-]+")


def parse_sources(value: Any) -> tuple[MixedSource, ...]:
    """`value` is a recipe's list of tables, or a flag's text: a TOML file with such tables; none for none."""
    if isinstance(value, str):
        return () if value in ("", "none") else parse_sources(_tables_of(value))
    if isinstance(value, Mapping):
        raise ConfigError("[data.sources] is one table.", f"{TABLE} before each source, in two brackets")
    if not isinstance(value, Sequence) or not all(isinstance(one, (Mapping, MixedSource)) for one in value):
        raise ConfigError(f"data.sources = {value} is not a list of tables.", f"{TABLE} before each source")
    if not value:
        raise ConfigError("data.sources = [] has no source.", f"leave it out, or {TABLE} with a name")
    found = tuple(
        one if isinstance(one, MixedSource) else _source(nth, one) for nth, one in enumerate(value, 1)
    )
    check_labels(found)
    return found


def check_labels(sources: Sequence[MixedSource]) -> None:
    """Raises ConfigError unless each source has a label of its own that a metric's name may have."""
    labels = [one.label for one in sources]
    for nth, label in enumerate(labels, 1):
        if not _LABEL.fullmatch(label):
            raise ConfigError(
                f"{TABLE} {nth}: label = {label!a} is not letters, digits, _ . + -.",
                f'label = "{default_label(label)}"',
            )
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        places = " and ".join(str(nth) for nth, label in enumerate(labels, 1) if label == twice)
        free = next(name for n in itertools.count(2) if (name := f"{twice}-{n}") not in labels)
        raise ConfigError(
            f"{TABLE} {places} have the same label, {twice}.", f'label = "{free}" in one of them'
        )


def as_tables(sources: Sequence[MixedSource]) -> list[dict[str, Any]]:
    """The given fields of each source, as a recipe holds them."""
    return [
        {name: value for name in _FIELDS if (value := getattr(one, name)) not in ("", 0, {})}
        for one in sources
    ]


def _tables_of(path: str) -> Any:
    try:
        tree = parse_toml(read_limited(Path(path)).decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"{FLAG} {path} cannot be read ({error.strerror}).", f"{FLAG} FILE.toml with {TABLE} in it"
        ) from None
    except OddFile as error:
        raise ConfigError(
            f"{FLAG} {path} cannot be used: {error}.", f"{FLAG} FILE.toml with {TABLE} in it"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{FLAG} {path} is not TOML: {error}.", f"{FLAG} FILE.toml with {TABLE} in it"
        ) from None
    data = tree.get("data", {})
    tables = data.get("sources") if isinstance(data, Mapping) else None
    if tables is None:
        raise ConfigError(f"{FLAG} {path} has no source.", f'{TABLE} and, below it, name = "FILE or FOLDER"')
    return tables


def _source(nth: int, table: Mapping[str, Any]) -> MixedSource:
    where = f"{TABLE} {nth}"
    for key in table:
        if key not in _FIELDS:
            other = f'args = {{{key} = "VALUE"}}, if the data set has it; here: {", ".join(_FIELDS)}'
            raise ConfigError(
                f"{where}: {key} is not a field of a source.", nearest(key, _FIELDS, "{} = VALUE", other)
            )
    for key in _TEXTS:
        if not isinstance(table.get(key, ""), str):
            raise ConfigError(f"{where}: {key} = {table[key]} is not text.", f'{key} = "{table[key]}"')
    if not table.get("name"):
        raise ConfigError(f"{where} has no name.", 'name = "FILE or FOLDER", or a data set of --data.name')
    if not isinstance(table.get("args", {}), Mapping):
        raise ConfigError(f"{where}: args = {table['args']} is not a table.", 'args = {NAME = "VALUE"}')
    for key in _NUMBERS:
        if key in table:
            _check_number(where, key, table[key])
    if "weight" in table and "epochs" in table:
        raise ConfigError(
            f"{where}: weight = {table['weight']} and epochs = {table['epochs']} both set how often "
            f"{table['name']} is seen.",
            "leave one of them out",
        )
    return MixedSource(**table)


def _check_number(where: str, key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{where}: {key} = {value} is not a number.", f"{key} = 1")
    if not math.isfinite(value) or value <= 0:
        raise ConfigError(
            f"{where}: {key} = {value} is out of range: above 0.", f"{key} = 1, or leave the source out"
        )
