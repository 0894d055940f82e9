"""Describes a built-in model: sizes with their ranges, presets, and facts from the data.

Sizes are a frozen dataclass whose fields are the names of --model.args; it validates itself on creation. Not
here: any model.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import nn

from fsdp.base.errors import ConfigError
from fsdp.models.factory import unknown_argument
from fsdp.models.source_folder import SourceFolder

Facts = Mapping[str, Any]
Sizes = TypeVar("Sizes")


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """A built-in model. The first preset is the default."""

    sizes: type[Any]
    presets: Mapping[str, Mapping[str, Any]]
    reads: str
    """The fact that identifies its kind of data: vocab_size for tokens, num_classes for images."""
    from_facts: Callable[[Facts], dict[str, Any]]
    check_facts: Callable[[Any, Facts], None]
    build: Callable[[Any], nn.Module]
    find_folder: Callable[[str], FoundFolder | None] | None = None
    """Finds the folder of transformers that --model.weights names, if the model reads such folders."""


class FoundFolder(Protocol):
    """A folder whose config.json has the sizes of a built-in model."""

    def sizes(
        self, facts: Facts, preset: tuple[str, Mapping[str, Any]], args: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The sizes of the folder; ConfigError if preset or args differ from them."""
        ...

    def source(self, sizes: Any, build: Callable[[], nn.Module]) -> SourceFolder: ...


def size(default: Any, low: float = 1, below: float | None = None) -> Any:
    """Declares a field of sizes with its range."""
    return dataclasses.field(default=default, metadata={"low": low, "below": below})


def make_sizes(cls: type[Sizes], given: Mapping[str, Any], owner: str) -> Sizes:
    """Builds sizes from free arguments; an unknown name or a wrong type is a ConfigError."""
    hints = typing.get_type_hints(cls)
    for name in given:
        if name not in hints:
            raise unknown_argument(name, list(hints), "--model.args", owner)
    return cls(**{name: _typed(name, value, hints[name]) for name, value in given.items()})


def _typed(name: str, value: Any, kind: type) -> Any:
    if kind in (bool, str) and isinstance(value, kind):
        return value
    if (
        kind in (int, float)
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        and kind(value) == value
    ):
        return kind(value)
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}[kind]
    example = {bool: "true", int: "8", float: "0.1", str: "NAME"}[kind]
    raise ConfigError(f"--model.args.{name} {value} is not {wanted}.", f"--model.args.{name} {example}")


def check_ranges(sizes: Any) -> None:
    """Checks each field against its declared range."""
    for field in dataclasses.fields(sizes):
        value, low, below = getattr(sizes, field.name), field.metadata.get("low"), field.metadata.get("below")
        if low is not None and value < low:
            raise ConfigError(
                f"--model.args.{field.name} {value} is less than {low}.",
                f"--model.args.{field.name} {field.default}",
            )
        if below is not None and value >= below:
            raise ConfigError(
                f"--model.args.{field.name} {value} is not below {below}.",
                f"--model.args.{field.name} {field.default}",
            )


def check_multiple(sizes: Any, whole: str, part: str) -> None:
    """Checks that `whole` is a multiple of `part`; the hint is the nearest smaller `part` that divides it."""
    total, piece = getattr(sizes, whole), getattr(sizes, part)
    if total % piece:
        fitting = max(n for n in range(1, min(piece, total) + 1) if total % n == 0)
        raise ConfigError(
            f"--model.args.{whole} {total} is not a multiple of --model.args.{part} {piece}.",
            f"--model.args.{part} {fitting}",
        )


def check_covers(sizes: Any, name: str, facts: Facts, fact: str, what: str) -> None:
    """Checks that the model has at least as many classes, tokens or positions as the data."""
    value, needed = getattr(sizes, name), facts.get(fact)
    if needed is not None and value < needed:
        raise ConfigError(
            f"--model.args.{name} {value} is too few: the data has {needed} {what}.",
            f"--model.args.{name} {needed}",
        )


def check_equals(sizes: Any, name: str, wanted: int | None, what: str) -> None:
    value = getattr(sizes, name)
    if wanted is not None and value != wanted:
        raise ConfigError(
            f"--model.args.{name} {value} does not fit: the data has {what} {wanted}.",
            f"--model.args.{name} {wanted}",
        )
