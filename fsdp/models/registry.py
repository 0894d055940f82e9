"""Resolves --model.name to a ModelSpec: the built-in models, folders of transformers, and users' factories.

`package.module:factory` is any callable that returns an nn.Module. It is built once on the meta device when
it is resolved, so that errors are reported before any process group exists. Not here: weights, sharding.
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
from fsdp.models.factory import PREFIX, BuiltIn, Facts, blame, check_model, load_attribute, parameters_of
from fsdp.models.init import draw_parameters, fill_buffers, seeded, to_empty

if TYPE_CHECKING:
    from fsdp.models.hf import PretrainedFolder
    from fsdp.models.hf_weights import ModuleDraws
    from fsdp.models.transformer import LlamaFormat

BUILT_INS = {"vit": "vision", "transformer": "transformer", "mlp": "vision"}
"""--model.name → the module that has it."""
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
    name, flag = section.name, f"--model.name {section.name}"
    if name.startswith(PREFIX):
        from fsdp.models.hf import resolve_folder

        if section.preset:
            raise _no_preset(section, "config.json has its sizes")
        folder = resolve_folder(name, section.args, facts)
        return ModelSpec(
            name=name, build=folder.build, sizes=dict(section.args), knows_inits=False, pretrained=folder
        )
    if ":" in name:
        return _of_factory(section, facts)
    if name not in BUILT_INS:
        hint = "--model.name package.module:factory for your own model"
        raise ConfigError(
            f"{flag} is not {', '.join(BUILT_INS)}, hf:FOLDER or package.module:factory.",
            nearest(name, BUILT_INS, "--model.name {}", hint, cutoff=0.5),
        )
    model: BuiltIn = importlib.import_module(f"fsdp.models.{BUILT_INS[name]}").BUILT_IN[name]
    preset = section.preset or next(iter(model.presets))
    if preset not in model.presets:
        raise ConfigError(
            f"--model.preset {preset} is not one of {name}'s: {', '.join(model.presets)}.",
            nearest(
                preset, model.presets, "--model.preset {}", f"--model.preset {next(iter(model.presets))}"
            ),
        )
    other = next((fact for fact in _DATA_FOR if fact != model.reads and fact in facts), None)
    if other is not None and model.reads not in facts:
        reads, data = _DATA_FOR[model.reads]
        raise ConfigError(
            f"{flag} reads {reads}, but the data holds {_DATA_FOR[other][0]}.", f"--data.name {data}"
        )
    if {"channels", "image_size"} <= facts.keys():
        facts = {**facts, "pixels": facts["channels"] * facts["image_size"] ** 2}
    sizes = model.sized(facts, {**model.presets[preset], **section.args}, flag)
    build = partial(model.build, sizes)
    return ModelSpec(name=name, build=build, sizes=asdict(sizes), knows_inits=True)


def _no_preset(section: ModelSection, why: str) -> ConfigError:
    return ConfigError(
        f"--model.preset {section.preset} has no effect on {section.name}: {why}.",
        "leave it out; --model.args.NAME VALUE sets a size",
    )


def build_real(spec: ModelSpec, seed: int, device: str | torch.device = "cpu") -> nn.Module:
    """Builds the model with a run's initial weights; on the host first if it has no param_inits()."""
    if spec.knows_inits:
        with torch.device("meta"):
            model = spec.build()
        to_empty(model, device)
        draw_parameters(model, seed)
        fill_buffers(model, device)
        return model
    with seeded(seed), torch.device("cpu"):
        model = spec.build()
    draws = spec.draws(seed, lambda: model)
    if draws is not None:
        model.load_state_dict(draws)
    return model.to(device)


# ---------------------------------------------------------------- user factories


def _of_factory(section: ModelSection, facts: Facts) -> ModelSpec:
    """The arguments are --model.args, then the facts that the factory has parameters for."""
    factory = load_attribute(section.name, "--model.name")
    args, takes = dict(section.args), parameters_of(factory)
    if takes is not None:
        if section.preset and not takes.accepts("preset"):
            raise _no_preset(section, "it has no parameter preset")
        args |= {"preset": section.preset} if section.preset else {}
        takes.check(args, "--model.args", section.name)
        args |= {name: facts[name] for name in takes.named if name in facts and name not in args}
        if missing := takes.missing(args):
            hint = f"--model.args.{missing[0]} VALUE"
            raise ConfigError(f"{section.name} needs {', '.join(missing)}.", hint)
    build = partial(_built, section.name, factory, args)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        trial = build()
    check_model(trial, section.name, facts)
    knows_inits = callable(getattr(trial, "param_inits", None))
    return ModelSpec(name=section.name, build=build, sizes=args, knows_inits=knows_inits)


ON_META = (
    "it is built on the meta device first, where tensors have no values: leave out .to(DEVICE), .cuda() and "
    ".cpu(), and make values that it reads with device='cpu', as torch.linspace(0, 0.1, 12, device='cpu'); "
    "with torch.device('cpu'): around from_pretrained, or --model.name hf:FOLDER"
)


def _built(path: str, factory: Callable[..., Any], args: Mapping[str, Any]) -> nn.Module:
    try:
        model = factory(**args)
    except ConfigError:
        raise
    except Exception as error:
        meta = torch.get_default_device().type == "meta"
        hint = ON_META if meta else "the error is on that line of the factory"
        raise ConfigError(f"--model.name {path} failed: {blame(error)}.", hint) from error
    # Of a wrapper forward takes any arguments: which data the model gets could not be read from it.
    plain = isinstance(model, nn.Module) and not isinstance(model, nn.DataParallel)
    if not plain or uncompiled(model) is not model:
        raise ConfigError(
            f"--model.name {path} returned a {type(model).__name__}, not a model of its own.",
            "return the nn.Module itself; --speed.compile true compiles its units",
        )
    return model  # type: ignore[no-any-return]
