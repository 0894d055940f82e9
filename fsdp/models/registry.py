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
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from fsdp.base.errors import ConfigError
from fsdp.base.text import nearest
from fsdp.base.torch_private.core import uncompiled
from fsdp.config import ModelSection
from fsdp.config.fields import expanded
from fsdp.models.checks import check_model
from fsdp.models.factory import PREFIX, BuiltIn, Facts, blame, load_attribute, parameters_of
from fsdp.models.init import draw_parameters, fill_buffers, seeded, to_empty

if TYPE_CHECKING:
    from fsdp.models.hf import PretrainedFolder
    from fsdp.models.hf_weights import ModuleDraws
    from fsdp.models.transformer import LlamaFormat

BUILT_INS = ("vit", "transformer", "mlp")
OWN_MODEL = "--model.name package.module:factory for your own model"
_DATA_FOR = {"num_classes": ("images", "digits"), "vocab_size": ("tokens", "text")}


SourceFolder: TypeAlias = "PretrainedFolder | LlamaFormat"
"""The format of transformers in which a model is written."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """build() creates the module on torch's default device; on a real one it draws from torch's generator."""

    name: str
    build: Callable[[], nn.Module]
    sizes: Mapping[str, Any]
    knows_inits: bool
    pretrained: PretrainedFolder | None = None

    def draws(self, seed: int, build_whole: Callable[[], nn.Module]) -> ModuleDraws | None:
        """Random weights module by module, for a model of transformers that --model.name names."""
        if self.pretrained is None:
            return None
        from fsdp.models.hf_weights import ModuleDraws

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
    model: BuiltIn = importlib.import_module(f"fsdp.models.{section.name}").BUILT_IN
    preset = section.preset or next(iter(model.presets))
    if preset not in model.presets:
        first = f"--model.preset {next(iter(model.presets))}"
        raise ConfigError(
            f"--model.preset {preset} is not one of {section.name}'s: {', '.join(model.presets)}.",
            nearest(preset, model.presets, "--model.preset {}", first, cutoff=0.3),
        )
    other = next((fact for fact in _DATA_FOR if fact != model.reads and fact in facts), None)
    if other is not None and model.reads not in facts:
        reads, data = _DATA_FOR[model.reads]
        raise ConfigError(
            f"--model.name {section.name} reads {reads}, but the data holds {_DATA_FOR[other][0]}.",
            f"--data.name {data}",
        )
    for folder in (expanded(section.weights), expanded(section.weights) / "full_model"):
        if section.weights.startswith(PREFIX) or (section.weights and (folder / "config.json").is_file()):
            named = section.weights if section.weights.startswith(PREFIX) else f"{PREFIX}{folder}"
            raise ConfigError(
                f"--model.weights {section.weights} is a model of transformers, not a state dict of the "
                f"{section.name}.",
                f"--model.name {named} without --model.weights",
            )
    if {"channels", "image_size"} <= facts.keys():
        facts = {**facts, "pixels": facts["channels"] * facts["image_size"] ** 2}
    args = {**model.presets[preset], **section.args}
    sizes = model.sized(facts, args, f"--model.name {section.name}")
    build = partial(model.build, sizes)
    return ModelSpec(name=section.name, build=build, sizes=asdict(sizes), knows_inits=True)


def _resolve_pretrained(section: ModelSection, facts: Facts) -> ModelSpec:
    if section.preset:
        raise ConfigError(
            f"--model.preset {section.preset} has no effect on {section.name}: config.json has its sizes.",
            "leave it out, or --model.args.NAME VALUE for a field of config.json",
        )
    from fsdp.models.hf import resolve_folder

    folder = resolve_folder(section.name, section.args, facts)
    return ModelSpec(
        name=section.name, build=folder.build, sizes=dict(section.args), knows_inits=False, pretrained=folder
    )


def build_real(spec: ModelSpec, seed: int, device: str | torch.device = "cpu") -> nn.Module:
    """Builds the model with a run's initial weights; on the host first if it has no param_inits()."""
    if not spec.knows_inits:
        return _built_whole(spec, seed).to(device)
    with torch.device("meta"):
        model = spec.build()
    to_empty(model, device)
    draw_parameters(model, seed)
    fill_buffers(model, device)
    return model


def _built_whole(spec: ModelSpec, seed: int) -> nn.Module:
    with seeded(seed), torch.device("cpu"):
        model = spec.build()
    draws = spec.draws(seed, lambda: model)
    if draws is not None:
        model.load_state_dict(draws)
    return model


# ---------------------------------------------------------------- user factories


def _resolve_factory(section: ModelSection, facts: Facts) -> ModelSpec:
    factory = load_attribute(section.name, "--model.name")
    args = _arguments(section, factory, facts)
    build = partial(_built, section.name, factory, args)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        trial = build()
    check_model(trial, section.name, facts)
    knows_inits = callable(getattr(trial, "param_inits", None))
    if knows_inits:
        _check_inits(section.name, trial)
    return ModelSpec(name=section.name, build=build, sizes=args, knows_inits=knows_inits)


def _arguments(section: ModelSection, factory: Callable[..., Any], facts: Facts) -> dict[str, Any]:
    """--model.args, then the facts that the factory has parameters for; checked against its signature."""
    args, takes = dict(section.args), parameters_of(factory)
    if takes is None:
        return args
    if section.preset:
        if not takes.accepts("preset"):
            raise ConfigError(
                f"--model.preset {section.preset} has no effect on {section.name}: "
                "it has no parameter preset.",
                "leave it out, or give the factory a parameter preset",
            )
        args["preset"] = section.preset
    takes.check(args, "--model.args", section.name)
    args |= {name: facts[name] for name in takes.named if name in facts and name not in args}
    if missing := takes.missing(args):
        raise ConfigError(f"{section.name} needs {', '.join(missing)}.", f"--model.args.{missing[0]} VALUE")
    return args


def _built(path: str, factory: Callable[..., Any], args: Mapping[str, Any]) -> nn.Module:
    flag = f"--model.name {path}"
    try:
        model = factory(**args)
    except ConfigError:
        raise
    except Exception as error:
        meta = torch.get_default_device().type == "meta"
        hint = ON_META if meta else "the error is on that line of the factory"
        raise ConfigError(f"{flag} failed: {blame(error)}.", hint) from error
    # Of a wrapper forward takes any arguments: which data the model gets could not be read from it.
    if (
        not isinstance(model, nn.Module)
        or isinstance(model, nn.DataParallel)
        or uncompiled(model) is not model
    ):
        raise ConfigError(
            f"{flag} returned a {type(model).__name__}, not a model of its own.",
            "return the nn.Module itself; --speed.compile true compiles its units",
        )
    return model


ON_META = (
    "it is built on the meta device first, where tensors have no values: leave out .to(DEVICE), .cuda() and "
    ".cpu(), and make values that it reads with device='cpu', as torch.linspace(0, 0.1, 12, device='cpu'); "
    "with torch.device('cpu'): around from_pretrained, or --model.name hf:FOLDER"
)


def _check_inits(path: str, trial: Any) -> None:
    inits = trial.param_inits()
    undrawn = next((name for name, _ in trial.named_parameters() if name not in inits), None)
    unfilled = next((name for name, _ in trial.named_buffers()), None)
    if undrawn is not None:
        raise ConfigError(
            f"--model.name {path}: its param_inits() has no entry for {undrawn}.",
            "name every parameter of named_parameters(), or leave param_inits() out",
        )
    if unfilled is not None and not callable(getattr(trial, "init_buffers", None)):
        raise ConfigError(
            f"--model.name {path} has param_inits(), but nothing fills its buffer {unfilled}.",
            "add init_buffers(device) that fills every buffer, or leave param_inits() out",
        )
