"""The arguments of a data set: the common ones (Where), and checks of --data.args against a function's
keyword-only parameters, their types and ranges.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.config import Args, DataSection, MixedSource
from fsdp.models.factory import unknown_argument


@dataclass(frozen=True)
class Where:
    """Arguments common to all data sets: --data.dir, seq_len, tokenizer, and the model's facts."""

    dir: str
    seq_len: int
    model_facts: Args
    flag: str = "--data.dir"
    """The flag that gave `dir`: --data.name if that is a path."""
    tokenizer: str = ""

    def __str__(self) -> str:
        return f"{self.flag} {self.dir}"


def source_section(section: DataSection, one: MixedSource) -> DataSection:
    """A mixture's source as --data.name would give it, with the section's other fields."""
    return dataclasses.replace(
        section, name=one.name, dir=one.dir, args=one.args, tokenizer=one.tokenizer, sources=()
    )


def check_args(function: Callable[..., Any], given: Args, owner: str) -> dict[str, Any]:
    """Checks --data.args against the keyword-only parameters of a function and their types."""
    hints = typing.get_type_hints(function)
    known = [n for n, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name in given:
        if name not in known:
            raise unknown_argument(name, known, "--data.args", owner)
    return {name: _typed(name, value, hints[name]) for name, value in given.items()}


def _typed(name: str, value: Any, hint: Any) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal and value in typing.get_args(kind):
            return value
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(kind, type) and isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
            return value
    raise ConfigError(
        f"--data.args.{name} {value} is not {_kinds(kinds)}.", f"--data.args.{name} {_example(kinds)}"
    )


_WORDS: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "1"), float: ("a number", "0.1"), bool: ("true or false", "true"),
    str: ("text", "TEXT"), list: ("a list", "[0.5]"),
}  # fmt: skip


def _kinds(kinds: tuple[Any, ...]) -> str:
    return " or ".join(
        " or ".join(typing.get_args(k)) or _WORDS[k][0] for k in kinds if k is not types.NoneType
    )


def _example(kinds: tuple[Any, ...]) -> str:
    return str((typing.get_args(kinds[0]) or (_WORDS[kinds[0]][1],))[0])


def check_range(name: str, value: float, low: float, high: float | None = None) -> None:
    """Raises ConfigError if an argument of a data set is out of range."""
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ConfigError(
            f"--data.args.{name} {value} is not {bounds}.",
            f"--data.args.{name} {max(low, min(value, high or low))}",
        )
