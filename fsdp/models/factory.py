"""What builds a model: callables of the user, `package.module:factory`, and the sizes of built-in models.

Callables are loaded for models, data, losses, hooks and optimizers; an error in one is reported with the flag
that named it and the line that failed. Sizes of a built-in model are a frozen dataclass whose fields are the
names of --model.args. Not here: which model is built (registry.py).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import traceback
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from fsdp.base.errors import ConfigError, one_line
from fsdp.base.text import nearest
from fsdp.base.torchvision_import import prepare_torchvision

# ---------------------------------------------------------------- a user's callable


def load_attribute(path: str, flag: str) -> Callable[..., Any]:
    """Returns the callable `package.module:attribute`, with the current directory importable as for a script
    in it.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{flag} {path} is not package.module:factory.", f"{flag} my_module:build")
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.insert(0, str(Path.cwd()))
    prepare_torchvision()  # the module, or transformers within it, may import torchvision
    owner: Any = _import(module_name, path, flag)
    for part in attribute.split("."):
        if not hasattr(owner, part):
            public = [n for n, value in vars(owner).items() if callable(value) and not n.startswith("_")]
            listing = f'python -c "import {module_name}; print(dir({module_name}))"'
            hint = nearest(part, public, f"{flag} {module_name}:{{}}", listing, cutoff=0.5)
            raise ConfigError(f"{flag} {path}: {getattr(owner, '__name__', owner)} has no {part}.", hint)
        owner = getattr(owner, part)
    if not callable(owner):
        raise ConfigError(
            f"{flag} {path} is a {type(owner).__name__}, which cannot be called.",
            "name a class or a function",
        )
    return owner


def _import(module_name: str, path: str, flag: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(missing + "."):
            raise ConfigError(
                f"{flag} {path}: there is no module {missing}, neither installed nor in {Path.cwd()}.",
                "start in the folder of the module, or set PYTHONPATH=FOLDER",
            ) from None
        raise ConfigError(
            f"{flag} {path}: {module_name} imports {missing}, which is not installed.",
            f"pip install {missing.split('.')[0]}",
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{flag} {path}: importing it failed: {blame(error)}.", f'python -c "import {module_name}"'
        ) from error


def blame(error: BaseException) -> str:
    """Formats an error in a user's code as one line with file and line number."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{one_line(error)} ({frame.filename}:{frame.lineno})"


@dataclass(frozen=True)
class Parameters:
    """Parameters of a callable that can be passed by name; `any_name` if it also accepts **kwargs."""

    named: Mapping[str, inspect.Parameter]
    any_name: bool

    def accepts(self, name: str) -> bool:
        return name in self.named or self.any_name

    def check(self, given: Iterable[str], flag: str, owner: str) -> None:
        for name in given:
            if not self.accepts(name):
                raise unknown_argument(name, list(self.named), flag, owner)

    def missing(self, given: Mapping[str, Any]) -> list[str]:
        return [name for name, one in self.named.items() if one.default is one.empty and name not in given]


def parameters_of(factory: Callable[..., Any]) -> Parameters | None:
    """Reads a callable's parameters; None for a builtin without a signature."""
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {name: parameter for name, parameter in parameters.items() if parameter.kind in by_name}
    return Parameters(named, any(one.kind is one.VAR_KEYWORD for one in parameters.values()))


def unknown_argument(name: str, known: list[str], flag: str, owner: str) -> ConfigError:
    takes = f"it accepts {', '.join(known)}" if known else "it accepts none"
    hint = nearest(name, known, f"{flag}.{{}} VALUE", takes, cutoff=0.5)
    return ConfigError(f"{flag}.{name} is not an argument of {owner}.", hint)


# ---------------------------------------------------------------- a built-in model

Facts = Mapping[str, Any]
"""What the data say of themselves: vocab_size, seq_len, num_classes, …"""
Sizes = TypeVar("Sizes")


@dataclass(frozen=True)
class Fact:
    """A fact of the data that a size is filled from: it must be covered, or equal if `exact`. `meaning` is a
    phrase with {} for its value.
    """

    name: str
    meaning: str
    exact: bool = False


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """A built-in model. The first preset is the default."""

    sizes: type[Any]
    presets: Mapping[str, Mapping[str, Any]]
    reads: str
    """The fact that identifies its kind of data: vocab_size for tokens, num_classes for images."""
    facts: Mapping[str, Fact]
    """Size → the fact of the data."""
    build: Callable[[Any], nn.Module]

    def from_facts(self, facts: Facts) -> dict[str, Any]:
        return {size: facts[fact.name] for size, fact in self.facts.items() if fact.name in facts}

    def check_facts(self, sizes: Any, facts: Facts) -> None:
        for name, fact in self.facts.items():
            value, needed = getattr(sizes, name), facts.get(fact.name)
            if needed is None or value == needed or (value > needed and not fact.exact):
                continue
            problem = "does not fit" if fact.exact else "is too few"
            raise ConfigError(
                f"--model.args.{name} {value} {problem}: the data has {fact.meaning.format(needed)}.",
                f"--model.args.{name} {needed}",
            )


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


_KINDS = {
    bool: ("true or false", "true"),
    int: ("a whole number", "8"),
    float: ("a number", "0.1"),
    str: ("a word", "NAME"),
}


def _typed(name: str, value: Any, kind: type) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(value, kind) if kind in (bool, str) else is_number and kind(value) == value:
        return kind(value)
    wanted, example = _KINDS[kind]
    raise ConfigError(f"--model.args.{name} {value} is not {wanted}.", f"--model.args.{name} {example}")


def check_ranges(sizes: Any) -> None:
    """Checks each field against its declared range."""
    for field in dataclasses.fields(sizes):
        value, low, below = getattr(sizes, field.name), field.metadata.get("low"), field.metadata.get("below")
        problem = "" if low is None or value >= low else f"less than {low}"
        problem = problem if below is None or value < below else f"not below {below}"
        if problem:
            flag = f"--model.args.{field.name}"
            raise ConfigError(f"{flag} {value} is {problem}.", f"{flag} {field.default}")


def check_multiple(sizes: Any, whole: str, part: str) -> None:
    """Checks that `whole` is a multiple of `part`; the hint is the nearest smaller `part` that divides it."""
    total, piece = getattr(sizes, whole), getattr(sizes, part)
    if total % piece:
        fitting = max(n for n in range(1, min(piece, total) + 1) if total % n == 0)
        raise ConfigError(
            f"--model.args.{whole} {total} is not a multiple of --model.args.{part} {piece}.",
            f"--model.args.{part} {fitting}",
        )
