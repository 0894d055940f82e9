"""What builds a model: callables of the user, `package.module:factory`; folders of save_pretrained by
`hf:FOLDER` or `hf:ORG/NAME`, of which nothing is downloaded; and the sizes of built-in models.

Callables are loaded for models, data, losses, hooks and optimizers; an error in one is reported with the flag
that named it and the line that failed. Sizes of a built-in model are a frozen dataclass whose fields are the
names of --model.args. Not here: which model is built (registry.py).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from fsdp.base.errors import ConfigError, one_line
from fsdp.base.proc import SETTINGS, regular_text
from fsdp.base.text import nearest
from fsdp.base.torch_private.core import prepare_torchvision
from fsdp.config.fields import expanded

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

    def check(self, names: Iterable[str], flag: str, owner: str) -> None:
        for name in names:
            if not self.accepts(name):
                raise unknown_argument(name, list(self.named), flag, owner)

    def missing(self, args: Mapping[str, Any]) -> list[str]:
        return [
            name
            for name, parameter in self.named.items()
            if parameter.default is parameter.empty and name not in args
        ]


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


# ---------------------------------------------------------------- a folder of save_pretrained

PREFIX = "hf:"
ADAPTER = "adapter_config.json"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def find_folder(name: str, flag: str = "--model.name") -> Path:
    """The folder itself, or the newest snapshot of a hub id in huggingface_hub's cache."""
    path = name.removeprefix(PREFIX)
    fault, hint = f"the folder {path} does not exist", f"{flag} hf:FOLDER or hf:ORG/NAME"
    try:
        if expanded(path).is_dir():
            return expanded(path)
        if _HUB_ID.fullmatch(path):
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(path, local_files_only=True))
    except Exception as error:  # several classes, which differ between versions
        fault = f"{path} is neither a folder nor in huggingface_hub's cache ({type(error).__name__})"
        hint = f"hf download {path}"
    raise ConfigError(f"{flag} {name}: {fault}.", hint, scope="node")  # files differ between nodes


def check_no_adapter(path: Path, flag: str, text: str) -> None:
    """Refuses a folder of the peft library's, or its weights, with the command that merges it."""
    file = path / ADAPTER if path.is_dir() else path.with_name(ADAPTER)
    if not file.is_file() or not (path.is_dir() or path.name.startswith("adapter_model.")):
        return
    try:
        base = json.loads(regular_text(file, SETTINGS))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        base = "a model that it does not name"
    raise ConfigError(
        f"{flag} {text} is an adapter of peft over {base}, without the weights of that model.",
        f'in Python, peft.AutoPeftModelForCausalLM.from_pretrained("{file.parent}").merge_and_unload()'
        '.save_pretrained("MERGED"), then --model.name hf:MERGED',
        scope="node",
    )


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

    def sized(self, facts: Facts, args: Mapping[str, Any], owner: str) -> Any:
        """From the data's facts and from `args`, which go before them; checked against the facts."""
        filled = {size: facts[fact.name] for size, fact in self.facts.items() if fact.name in facts}
        sizes = make_sizes(self.sizes, {**filled, **args}, owner)
        for name, fact in self.facts.items():
            value, needed = getattr(sizes, name), facts.get(fact.name)
            if needed is None or value == needed or (value > needed and not fact.exact):
                continue
            problem = "does not fit" if fact.exact else "is too few"
            raise ConfigError(
                f"--model.args.{name} {value} {problem}: the data has {fact.meaning.format(needed)}.",
                f"--model.args.{name} {needed}",
            )
        return sizes


def make_sizes(cls: type[Sizes], args: Mapping[str, Any], owner: str) -> Sizes:
    """Builds sizes from free arguments. A default gives its field's type; a whole number is at least 1 unless
    its default is 0, a number at least 0.
    """
    fields: Any = dataclasses.fields(cls)  # type: ignore[arg-type]
    defaults = {field.name: field.default for field in fields}
    for name, value in args.items():
        if name not in defaults:
            raise unknown_argument(name, list(defaults), "--model.args", owner)
        default, kind = defaults[name], type(defaults[name])
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        least = 1 if kind is int and default else 0
        if not (isinstance(value, bool) if kind is bool else number and kind(value) == value >= least):
            wanted = {bool: "true or false", int: f"a whole number from {least}", float: "a number from 0"}
            shown = str(default).lower() if kind is bool else default
            raise ConfigError(
                f"--model.args.{name} {value} is not {wanted[kind]}.", f"--model.args.{name} {shown}"
            )
    return cls(**{name: type(defaults[name])(value) for name, value in args.items()})


def check_multiple(sizes: Any, product: str, factor: str) -> None:
    """The hint is the nearest smaller factor that divides the product."""
    total, part = getattr(sizes, product), getattr(sizes, factor)
    if total % part:
        fitting = max(n for n in range(1, min(part, total) + 1) if total % n == 0)
        raise ConfigError(
            f"--model.args.{product} {total} is not a multiple of --model.args.{factor} {part}.",
            f"--model.args.{factor} {fitting}",
        )
