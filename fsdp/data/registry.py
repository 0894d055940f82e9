"""From --data.name to a DataSet: a function whose keyword arguments are --data.args, the built-in ones or a person's own.

A data set's module is imported when it is asked for and not before: no other's imports are paid for. Not here: any data.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp.config import Args, DataSection
from fsdp.data.base import DataSet
from fsdp.errors import ConfigError
from fsdp.models.factory import unknown_argument

BUILT_INS = ("digits", "fashion_mnist", "text", "tokens", "folder", "synthetic")


@dataclass(frozen=True)
class Where:
    """What every data set may read beside its own arguments: --data.dir, --data.seq_len, and what the model says."""

    dir: str
    seq_len: int
    model_facts: Args
    flag: str = "--data.dir"
    """Which flag names `dir`: --data.name where that is a path."""

    def __str__(self) -> str:
        return f"{self.flag} {self.dir}"


def build_dataset(section: DataSection, model_facts: Mapping[str, Any] | None = None) -> DataSet:
    """A pure function of the section and the files: each rank calls it and gets the same."""
    where = Where(section.dir, section.seq_len, dict(model_facts or {}))
    if ":" in section.name:
        return importlib.import_module("fsdp.data.custom").build(section.name, where, section.args)
    if section.name not in BUILT_INS:
        near = difflib.get_close_matches(section.name, BUILT_INS, n=1, cutoff=0.5)
        raise ConfigError(
            f"--data.name {section.name} is not {', '.join(BUILT_INS)} or package.module:factory.",
            f"--data.name {near[0] if near else 'package.module:factory for data of yours'}",
        )
    build = importlib.import_module(f"fsdp.data.{section.name}").build
    dataset: DataSet = build(where, **check_args(build, section.args, f"--data.name {section.name}"))
    return dataset


def check_args(function: Callable[..., Any], given: Args, owner: str) -> dict[str, Any]:
    """--data.args against the keyword-only parameters of a function and their types."""
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
    raise ConfigError(f"--data.args.{name} {value} is not {_kinds(kinds)}.", f"--data.args.{name} {_example(kinds)}")


_WORDS: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "1"), float: ("a number", "0.1"), bool: ("true or false", "true"),
    str: ("text", "TEXT"), list: ("a list", "[0.5]"),
}  # fmt: skip


def _kinds(kinds: tuple[Any, ...]) -> str:
    return " or ".join(" or ".join(typing.get_args(k)) or _WORDS[k][0] for k in kinds if k is not types.NoneType)


def _example(kinds: tuple[Any, ...]) -> str:
    return str((typing.get_args(kinds[0]) or (_WORDS[kinds[0]][1],))[0])


def check_range(name: str, value: float, low: float, high: float | None = None) -> None:
    """One argument of a data set within its range."""
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ConfigError(
            f"--data.args.{name} {value} is not {bounds}.", f"--data.args.{name} {max(low, min(value, high or low))}"
        )
