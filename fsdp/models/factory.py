"""Loads a user's callable, `package.module:factory`, for models, data and hooks, and reads its signature.

An error in it is reported with the flag that named it and the line that failed. Not here: what it returns.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError, one_line
from fsdp.base.text import nearest
from fsdp.base.torchvision_import import prepare_torchvision


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
    found: Any = _import(module_name, path, flag)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise _unknown_attribute(found, part, path, flag)
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            f"{flag} {path} is a {type(found).__name__}, which cannot be called.",
            "name a class or a function",
        )
    return found


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


def _unknown_attribute(owner: Any, name: str, path: str, flag: str) -> ConfigError:
    public = [n for n, value in vars(owner).items() if callable(value) and not n.startswith("_")]
    module_name = path.partition(":")[0]
    listing = f'python -c "import {module_name}; print(dir({module_name}))"'
    hint = nearest(name, public, f"{flag} {module_name}:{{}}", listing, cutoff=0.5)
    return ConfigError(f"{flag} {path}: {getattr(owner, '__name__', owner)} has no {name}.", hint)


def blame(error: BaseException) -> str:
    """Formats an error in a user's code as one line with file and line number."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{one_line(error)} ({frame.filename}:{frame.lineno})"


# ---------------------------------------------------------------- its parameters


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
        found = inspect.signature(factory).parameters
    except ValueError:
        return None
    named = {
        name: one for name, one in found.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }
    return Parameters(named, any(one.kind is one.VAR_KEYWORD for one in found.values()))


def unknown_argument(name: str, known: list[str], flag: str, owner: str) -> ConfigError:
    takes = f"it accepts {', '.join(known)}" if known else "it accepts none"
    hint = nearest(name, known, f"{flag}.{{}} VALUE", takes, cutoff=0.5)
    return ConfigError(f"{flag}.{name} is not an argument of {owner}.", hint)
