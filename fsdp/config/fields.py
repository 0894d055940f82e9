"""The fields as data: `section.field` → its type, default and help; and a Config in that flat form.

Read by the parser, by --help (help.py) and by code that lists fields. Not here: their declarations
(sections.py).
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp.config.sections import Args, Config, Texts


@dataclass(frozen=True)
class FieldSpec:
    """One `--section.field`: its type, its default, and the metadata that `knob` gave it."""

    name: str
    type: Any
    default: Any
    meta: Mapping[str, Any]

    @property
    def is_args(self) -> bool:
        return self.type is Args or typing.get_origin(self.type) is typing.get_origin(Args)

    @property
    def is_texts(self) -> bool:
        """Named values that stay as typed: ray.env."""
        return self.is_args and typing.get_args(self.type) == typing.get_args(Texts)

    @property
    def is_tables(self) -> bool:
        """An array of tables: data.sources."""
        return typing.get_origin(self.type) is tuple


def _specs(cls: type, prefix: str = "") -> Iterator[FieldSpec]:
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        kind = hints[f.name]
        if dataclasses.is_dataclass(kind):
            yield from _specs(typing.cast(type, kind), f"{prefix}{f.name}.")
        else:
            default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
            yield FieldSpec(prefix + f.name, kind, default, f.metadata)


FIELDS: Mapping[str, FieldSpec] = types.MappingProxyType({spec.name: spec for spec in _specs(Config)})


def flatten(config: Config) -> dict[str, Any]:
    """`section.field` → value, for every field."""
    flat: dict[str, Any] = {}
    for name in FIELDS:
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        flat[name] = value
    return flat
