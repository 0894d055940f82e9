"""Resolves --model.name to a ModelSpec: the built-in models, folders of transformers, and users' factories.

`package.module:factory` is any callable that returns an nn.Module. It is built once on the meta device when
it is resolved, so that errors are reported before any process group exists. Not here: loading the callable
(factory.py), weights, or sharding.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp.base.errors import ConfigError
from fsdp.base.text import nearest
from fsdp.base.torch_private.core import uncompiled
from fsdp.config import ModelSection
from fsdp.models.builtin import BuiltIn, Facts, make_sizes
from fsdp.models.checks import check_parameters, check_vocabulary
from fsdp.models.factory import blame, load_attribute, parameters_of
from fsdp.models.hub import PREFIX
from fsdp.models.packed_check import check_positions
from fsdp.models.source_folder import SourceFolder

if TYPE_CHECKING:
    from fsdp.models.hf_random import ModuleDraws

BUILT_INS = ("vit", "transformer", "mlp")
OWN_MODEL = "--model.name package.module:factory for your own model"
_DATA_FOR = {"num_classes": ("images", "digits"), "vocab_size": ("tokens", "text")}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """build() creates the module on torch's default device; on a real one it draws from torch's generator."""

    name: str
    build: Callable[[], nn.Module]
    sizes: Mapping[str, Any]
    knows_inits: bool
    pretrained: SourceFolder | None = None

    def draws(self, seed: int, build_whole: Callable[[], nn.Module]) -> ModuleDraws | None:
        """Random weights module by module, for a model of transformers that --model.name names."""
        if self.knows_inits or self.pretrained is None:
            return None
        from fsdp.models.hf_random import ModuleDraws

        return ModuleDraws(self.build, seed, build_whole)


def resolve(section: ModelSection, facts: Facts) -> ModelSpec:
    """Resolves the section for this data. Facts fill only what preset and args leave open."""
    if section.name.startswith(PREFIX):
        return _resolve_pretrained(section, facts)
    if ":" in section.name:
        return _resolve_factory(section, facts)
    if section.name not in BUILT_INS:
        raise ConfigError(
            f"--model.name {section.name} is not {', '.join(BUILT_INS)}, hf:FOLDER or "
            "package.module:factory.",
            nearest(section.name, BUILT_INS, "--model.name {}", OWN_MODEL, cutoff=0.5),
        )
    return _resolve_built_in(section, facts, importlib.import_module(f"fsdp.models.{section.name}").BUILT_IN)


def _resolve_built_in(section: ModelSection, facts: Facts, model: BuiltIn) -> ModelSpec:
    preset = section.preset or next(iter(model.presets))
    if preset not in model.presets:
        first = f"--model.preset {next(iter(model.presets))}"
        raise ConfigError(
            f"--model.preset {preset} is not one of {section.name}'s: {', '.join(model.presets)}.",
            nearest(preset, model.presets, "--model.preset {}", first, cutoff=0.3),
        )
    _check_kind_of_data(section.name, model, facts)
    folder = model.find_folder(section.weights) if model.find_folder is not None else None
    if folder is None:
        given = {**model.from_facts(facts), **model.presets[preset], **section.args}
    else:
        named = (section.preset, model.presets[preset] if section.preset else {})
        given = folder.sizes(facts, named, section.args)
    sizes = make_sizes(model.sizes, given, f"--model.name {section.name}")
    model.check_facts(sizes, facts)
    build = partial(model.build, sizes)
    return ModelSpec(
        name=section.name,
        build=build,
        sizes=asdict(sizes),
        knows_inits=True,
        pretrained=None if folder is None else folder.source(sizes, build),
    )


def _check_kind_of_data(name: str, model: BuiltIn, facts: Facts) -> None:
    other = next((fact for fact in _DATA_FOR if fact != model.reads and fact in facts), None)
    if other is not None and model.reads not in facts:
        raise ConfigError(
            f"--model.name {name} reads {_DATA_FOR[model.reads][0]}, but the data holds "
            f"{_DATA_FOR[other][0]}.",
            f"--data.name {_DATA_FOR[model.reads][1]}",
        )


def _resolve_pretrained(section: ModelSection, facts: Facts) -> ModelSpec:
    if section.preset:
        raise ConfigError(
            f"--model.preset {section.preset} has no effect on {section.name}: config.json has its sizes.",
            "leave it out, or --model.args.NAME VALUE for a field of config.json",
        )
    from fsdp.models.hf import resolve_folder

    found = resolve_folder(section.name, section.args, facts)
    return ModelSpec(
        name=section.name, build=found.build, sizes=dict(section.args), knows_inits=False, pretrained=found
    )


# ---------------------------------------------------------------- user factories


def _resolve_factory(section: ModelSection, facts: Facts) -> ModelSpec:
    factory = load_attribute(section.name, "--model.name")
    given = _arguments(section, factory, facts)
    build = _Factory(section.name, factory, given)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        trial = build()
    check_parameters(trial, f"--model.name {section.name}")
    check_vocabulary(trial, section.name, facts)
    check_positions(trial, section.name, facts)
    return ModelSpec(
        name=section.name, build=build, sizes=given, knows_inits=_knows_inits(section.name, trial)
    )


def _arguments(section: ModelSection, factory: Callable[..., Any], facts: Facts) -> dict[str, Any]:
    """--model.args, then the facts that the factory has parameters for; checked against its signature."""
    given, takes = dict(section.args), parameters_of(factory)
    if takes is None:
        return given
    if section.preset:
        if not takes.accepts("preset"):
            raise ConfigError(
                f"--model.preset {section.preset} has no effect on {section.name}: "
                "it has no parameter preset.",
                "leave it out, or give the factory a parameter preset",
            )
        given["preset"] = section.preset
    takes.check(given, "--model.args", section.name)
    given |= {name: facts[name] for name in takes.named if name in facts and name not in given}
    if missing := takes.missing(given):
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
            hint = _on_meta(error) if meta else "the error is on that line of the factory"
            raise ConfigError(f"--model.name {self.path} failed: {blame(error)}.", hint) from error
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"--model.name {self.path} returned a {type(model).__name__}, not an nn.Module.",
                "return the model itself",
            )
        if isinstance(model, nn.DataParallel) or uncompiled(model) is not model:
            # Their forward takes any arguments: which data the model gets could not be read from it.
            raise ConfigError(
                f"--model.name {self.path} returned its model inside of {type(model).__name__}.",
                "return the model itself; --speed.compile true compiles its units",
            )
        return model


def _on_meta(error: Exception) -> str:
    if isinstance(error, NotImplementedError) and "copy out of meta" in str(error):
        return "leave out .to(DEVICE), .cuda() and .cpu() in the factory: the run places the model"
    if "from_pretrained" in str(error):
        return (
            "with torch.device('cpu'): around from_pretrained in the factory; or --model.name hf:FOLDER, of "
            "which each rank reads its own shard"
        )
    return (
        "it is built on the meta device first, where tensors have no values: read none while building, or "
        "make those with device='cpu', as torch.linspace(0, 0.1, 12, device='cpu')"
    )


def _knows_inits(path: str, trial: nn.Module) -> bool:
    inits = getattr(trial, "param_inits", None)
    if not callable(inits):
        return False
    undrawn = [name for name, _ in trial.named_parameters() if name not in inits()]
    if undrawn:
        raise ConfigError(
            f"--model.name {path}: its param_inits() has no entry for {undrawn[0]}.",
            "name every parameter of named_parameters(), or leave param_inits() out",
        )
    if list(trial.buffers()) and not callable(getattr(trial, "init_buffers", None)):
        name = next(name for name, _ in trial.named_buffers())
        raise ConfigError(
            f"--model.name {path} has param_inits(), but nothing fills its buffer {name}.",
            "add init_buffers(device) that fills every buffer, or leave param_inits() out",
        )
    return True
