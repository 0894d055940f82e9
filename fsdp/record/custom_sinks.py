"""Sinks of the user, `--run.sinks package.module:Class`, several separated by commas:

    Class(*, run_dir, config, from_step) → an object with scalars(step, values), and optionally close()

Made on rank 0 before the first step, with those of the arguments that it accepts. An exception in one loses
its records and is logged; the run continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.config import Config, flatten
from fsdp.models import load_attribute
from fsdp.models.factory import blame, parameters_of

FLAG = "--run.sinks"


class SinkError(Exception):
    """An exception in a user's sink, with its file and line."""


class CustomSink:
    """A user's sink whose errors name the place."""

    def __init__(self, path: str, made: Any) -> None:
        self.label = f"{FLAG} {path}"
        self._made = made

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._call(self._made.scalars, step, dict(values))

    def close(self) -> None:
        if callable(close := getattr(self._made, "close", None)):
            self._call(close)

    @staticmethod
    def _call(function: Callable[..., Any], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:
            raise SinkError(blame(error)) from error


def load_sinks(text: str) -> dict[str, Callable[..., Any]]:
    """The classes by name, imported. Raises ConfigError, on every rank the same."""
    paths = [part.strip() for part in text.split(",")]
    return {path: load_attribute(path, FLAG) for path in paths if path}


def build_sinks(config: Config, run_dir: Path, from_step: int) -> Iterator[CustomSink]:
    """One after the other, on rank 0. Raises ConfigError."""
    given = {"run_dir": run_dir, "config": flatten(config), "from_step": from_step}
    for path, made in load_sinks(config.run.sinks).items():
        yield _build(path, made, given)


def _build(path: str, factory: Callable[..., Any], given: Mapping[str, Any]) -> CustomSink:
    accepted = parameters_of(factory)
    every = accepted is None or accepted.any_name
    try:
        made = factory(
            **{n: v for n, v in given.items() if every or (accepted is not None and n in accepted.named)}
        )
    except Exception as error:
        raise ConfigError(
            f"{FLAG} {path} failed: {blame(error)}.", "it is called with (*, run_dir, config, from_step)"
        ) from error
    if not callable(getattr(made, "scalars", None)):
        raise ConfigError(
            f"{FLAG} {path}: {type(made).__name__} has no method scalars.",
            "def scalars(self, step, values): ...",
        )
    return CustomSink(path, made)
