"""The fields as data: `section.field` → its type, default and help; and a Config in that flat form.

Here live what the parser, --help and whoever lists knobs know of a field. Not here: the declarations
(sections.py).
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fsdp.config.sections import Args, Config


@dataclass(frozen=True)
class FieldSpec:
    """One `--section.field`: what the parser and --help know of it."""

    name: str
    type: Any
    default: Any
    meta: Mapping[str, Any]

    @property
    def is_args(self) -> bool:
        return self.type is Args or typing.get_origin(self.type) is typing.get_origin(Args)


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


def help_text(doc: str) -> str:
    """--help: every field with its type, default, unit and help."""
    lines = [
        doc.strip(),
        "",
        "flags (a recipe's [section] field is --section.field):",
        "  --config FILE",
        "      a recipe; flags go over it",
    ]
    for spec in FIELDS.values():
        unit = f" {spec.meta['unit']}" if spec.meta["unit"] else ""
        shown = str(spec.default).lower() if isinstance(spec.default, bool) else spec.default
        default = (
            "" if spec.is_args else f" (default: {shown!s}{unit})" if shown != "" else " (default: empty)"
        )
        suffix = ".NAME VALUE" if spec.is_args else f" {_type_name(spec)}"
        lines += [f"  --{spec.name}{suffix}", f"      {spec.meta['help']}{default}"]
    return "\n".join(lines)


def _type_name(spec: FieldSpec) -> str:
    if typing.get_origin(spec.type) is Literal:
        return "|".join(typing.get_args(spec.type))
    return {int: "INT", float: "FLOAT", bool: "true|false", str: "TEXT"}[spec.type]
