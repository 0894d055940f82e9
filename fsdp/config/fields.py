"""The fields of the configuration as data, and structured texts that some of them hold (`2:8`, `step`)."""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fsdp.base.errors import ConfigError
from fsdp.base.text import parse_count
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


def value_of(config: Config, name: str) -> Any:
    """The value of `section.field`."""
    section, _, key = name.rpartition(".")
    return getattr(getattr(config, section) if section else config, key)


def flatten(config: Config) -> dict[str, Any]:
    """`section.field` → value, for every field."""
    return {name: value_of(config, name) for name in FIELDS}


def shown_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "empty" if value == "" else str(value)


# ---------------------------------------------------------------- structured texts


def reshard_policy(text: str) -> bool | int | Literal["step"]:
    """Parses --mesh.reshard_after_forward: a bool, a number of ranks, or "step"."""
    if text in ("true", "false"):
        return text == "true"
    if text == "step":
        return "step"
    if ranks := parse_count(text):
        return ranks
    raise ConfigError(
        f"--mesh.reshard_after_forward {text} is not true, false, step or a number of ranks.",
        "--mesh.reshard_after_forward true",
    )


def worker_range(text: str) -> tuple[int, int]:
    """Parses --ray.num_workers: `4` is (4, 4), `2:8` is (2, 8)."""
    if (span := _span(text)) is None:
        raise ConfigError(
            f"--ray.num_workers {text} is not a number of workers or a range.", "--ray.num_workers 2 or 2:8"
        )
    return span


def profile_steps(text: str) -> tuple[int, int]:
    """Parses --profile.steps: `3:5` is (3, 5), `4` is (4, 4)."""
    if (span := _span(text)) is None:
        raise ConfigError(f"--profile.steps {text} is not first:last, counted from 1.", "--profile.steps 3:5")
    return span


def _span(text: str) -> tuple[int, int] | None:
    """`2:8` or `4`, from 1; None for anything else."""
    first, colon, last = text.partition(":")
    low, high = parse_count(first), parse_count(last if colon else first)
    return (low, high) if low and high and low <= high else None


def exists(path: str | Path) -> bool:
    """Path.exists raises for a name that is too long and for a folder that may not be searched."""
    try:
        return Path(path).exists()
    except OSError:
        return False


def expanded(path: str) -> Path:
    return Path(with_home(path))


def with_home(path: str) -> str:
    """The path with ~ replaced; as it is for a ~NAME of nobody, where Path.expanduser raises."""
    return os.path.expanduser(path)  # noqa: PTH111
