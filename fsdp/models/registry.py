"""From --model.name to something that builds: the built-in models and a person's own factories.

`package.module:factory` is any callable that returns an nn.Module. It is built once on the meta device when it is resolved, so
that what a person got wrong is said before any process group exists. Not here: weights, or how a model is sharded.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp.config import ModelSection
from fsdp.errors import ConfigError
from fsdp.models.builtin import BuiltIn, Facts, make_sizes, unknown_argument
from fsdp.torchvision_import import prepare_torchvision

BUILT_INS = ("vit", "transformer", "mlp")
_DATA_FOR = {"num_classes": ("images", "digits"), "vocab_size": ("tokens", "text")}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """build() makes the module on whatever device is torch's default; the real one draws from torch's global generator."""

    name: str
    build: Callable[[], nn.Module]
    sizes: Mapping[str, Any]
    knows_inits: bool


def resolve(section: ModelSection, facts: Facts) -> ModelSpec:
    """The model that a section means for this data. Facts fill only what preset and args leave open."""
    if ":" in section.name:
        return _resolve_factory(section, facts)
    if section.name not in BUILT_INS:
        near = difflib.get_close_matches(section.name, BUILT_INS, n=1, cutoff=0.5)
        raise ConfigError(
            f"--model.name {section.name} is not {', '.join(BUILT_INS)} or package.module:factory.",
            f"--model.name {near[0] if near else 'package.module:factory for a model of yours'}",
        )
    return _resolve_built_in(section, facts, importlib.import_module(f"fsdp.models.{section.name}").BUILT_IN)


def _resolve_built_in(section: ModelSection, facts: Facts, model: BuiltIn) -> ModelSpec:
    preset = section.preset or next(iter(model.presets))
    if preset not in model.presets:
        near = difflib.get_close_matches(preset, model.presets, n=1, cutoff=0.3)
        raise ConfigError(
            f"--model.preset {preset} is none of {section.name}'s: {', '.join(model.presets)}.",
            f"--model.preset {near[0] if near else next(iter(model.presets))}",
        )
    _check_kind_of_data(section.name, model, facts)
    given = {**model.from_facts(facts), **model.presets[preset], **section.args}
    sizes = make_sizes(model.sizes, given, f"--model.name {section.name}")
    model.check_facts(sizes, facts)
    return ModelSpec(name=section.name, build=lambda: model.build(sizes), sizes=asdict(sizes), knows_inits=True)


def _check_kind_of_data(name: str, model: BuiltIn, facts: Facts) -> None:
    other = next((fact for fact in _DATA_FOR if fact != model.reads and fact in facts), None)
    if other is not None and model.reads not in facts:
        raise ConfigError(
            f"--model.name {name} reads {_DATA_FOR[model.reads][0]}, but the data holds {_DATA_FOR[other][0]}.",
            f"--data.name {_DATA_FOR[model.reads][1]}",
        )


# ---------------------------------------------------------------- a person's own


def _resolve_factory(section: ModelSection, facts: Facts) -> ModelSpec:
    factory = load_attribute(section.name, "--model.name")
    given = _arguments(section, factory, facts)
    build = _Factory(section.name, factory, given)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        trial = build()
    return ModelSpec(name=section.name, build=build, sizes=given, knows_inits=_knows_inits(section.name, trial))


def load_attribute(path: str, flag: str) -> Callable[..., Any]:
    """What `package.module:attribute.of.it` names, with the current directory importable as for a script that lies there."""
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
        raise ConfigError(f"{flag} {path} is a {type(found).__name__}, which cannot be called.", "name a class or a function")
    return found


def _import(module_name: str, path: str, flag: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(missing + "."):
            raise ConfigError(
                f"{flag} {path}: there is no module {missing}, neither installed nor in {Path.cwd()}.",
                "start where the module lies, or set PYTHONPATH=FOLDER",
            ) from None
        raise ConfigError(
            f"{flag} {path}: {module_name} imports {missing}, which is not installed.", f"pip install {missing.split('.')[0]}"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{flag} {path}: importing it failed: {_where(error)}.", f'python -c "import {module_name}"'
        ) from error


def _unknown_attribute(owner: Any, name: str, path: str, flag: str) -> ConfigError:
    public = [n for n, value in vars(owner).items() if callable(value) and not n.startswith("_")]
    near = difflib.get_close_matches(name, public, n=1, cutoff=0.5)
    module_name = path.partition(":")[0]
    hint = f"{flag} {module_name}:{near[0]}" if near else f'python -c "import {module_name}; print(dir({module_name}))"'
    return ConfigError(f"{flag} {path}: {getattr(owner, '__name__', owner)} has no {name}.", hint)


def _where(error: BaseException) -> str:
    """An error in a person's code as one line with its place."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text} ({frame.filename}:{frame.lineno})"


def _arguments(section: ModelSection, factory: Callable[..., Any], facts: Facts) -> dict[str, Any]:
    """--model.args, then those facts that the factory has parameters for; checked against its signature."""
    given = dict(section.args)
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:  # a builtin without one
        return given
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if section.preset:
        if "preset" not in named and not takes_any:
            raise ConfigError(
                f"--model.preset {section.preset} says nothing to {section.name}: it has no parameter preset.",
                "leave it out, or give the factory a parameter preset",
            )
        given["preset"] = section.preset
    for name in given:
        if name not in named and not takes_any:
            raise unknown_argument(name, list(named), section.name)
    given |= {name: facts[name] for name in named if name in facts and name not in given}
    missing = [n for n, p in named.items() if p.default is p.empty and n not in given]
    if missing:
        raise ConfigError(f"{section.name} needs {', '.join(missing)}.", f"--model.args.{missing[0]} VALUE")
    return given


@dataclass(frozen=True)
class _Factory:
    path: str
    factory: Callable[..., Any]
    arguments: Mapping[str, Any]

    def __call__(self) -> nn.Module:
        meta = torch.get_default_device().type == "meta"
        try:
            model = self.factory(**self.arguments)
        except ConfigError:
            raise
        except Exception as error:
            on_meta = (
                "it is built on the meta device first, where tensors have shapes and no values: read none while building"
                if meta
                else "the line named is the factory's own"
            )
            raise ConfigError(f"--model.name {self.path} failed: {_where(error)}.", on_meta) from error
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"--model.name {self.path} returned a {type(model).__name__}, not an nn.Module.", "return the model itself"
            )
        return model


def _knows_inits(path: str, trial: nn.Module) -> bool:
    inits = getattr(trial, "param_inits", None)
    if not callable(inits):
        return False
    undrawn = [name for name, _ in trial.named_parameters() if name not in inits()]
    if undrawn:
        raise ConfigError(
            f"--model.name {path}: its param_inits() says nothing of {undrawn[0]}.",
            "name every parameter of named_parameters(), or leave param_inits() out",
        )
    if list(trial.buffers()) and not callable(getattr(trial, "init_buffers", None)):
        name = next(name for name, _ in trial.named_buffers())
        raise ConfigError(
            f"--model.name {path} has param_inits(), but nothing fills its buffer {name}.",
            "add init_buffers(device) that fills every buffer, or leave param_inits() out",
        )
    return True
