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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.base.text import nearest
from fsdp.base.torch_private.core import uncompiled
from fsdp.config import ModelSection
from fsdp.config.fields import expanded
from fsdp.models.checks import check_model
from fsdp.models.factory import BuiltIn, Facts, blame, load_attribute, make_sizes, parameters_of
from fsdp.models.hub import PREFIX
from fsdp.models.init import draw_parameters, fill_buffers, seeded, to_empty

if TYPE_CHECKING:
    from fsdp.models.hf import PretrainedFolder
    from fsdp.models.hf_weights import ModuleDraws

BUILT_INS = ("vit", "transformer", "mlp")
OWN_MODEL = "--model.name package.module:factory for your own model"
_DATA_FOR = {"num_classes": ("images", "digits"), "vocab_size": ("tokens", "text")}


class SourceFolder(Protocol):
    """The format of transformers in which a model is written."""

    @property
    def folder(self) -> Path | None:
        """Its tokenizer's files are copied; None for a model that did not start from a folder."""
        ...

    @property
    def class_name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that config.json names."""
        ...

    def build(self) -> nn.Module: ...

    def saved_pieces(self, model: Any) -> dict[str, dict[str, Tensor]]:
        """Model's name → the tensors that save_pretrained makes of it, as meta tensors by name."""
        ...

    def reverted(self, model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """One tensor of the model as save_pretrained names and splits it."""
        ...

    def saved_layer(self, name: str) -> str:
        """A module's name in the class that from_pretrained builds."""
        ...

    def config_json(self, dtype: torch.dtype) -> str: ...


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
    return _resolve_built_in(section, facts, importlib.import_module(f"fsdp.models.{section.name}").BUILT_IN)


def _resolve_built_in(section: ModelSection, facts: Facts, model: BuiltIn) -> ModelSpec:
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
    if section.name == "transformer":
        _refuse_folder(section.weights)
    if {"channels", "image_size"} <= facts.keys():
        facts = {**facts, "pixels": facts["channels"] * facts["image_size"] ** 2}
    given = {**model.from_facts(facts), **model.presets[preset], **section.args}
    sizes = make_sizes(model.sizes, given, f"--model.name {section.name}")
    model.check_facts(sizes, facts)
    build = partial(model.build, sizes)
    return ModelSpec(name=section.name, build=build, sizes=asdict(sizes), knows_inits=True)


def _refuse_folder(weights: str) -> None:
    """A folder of save_pretrained has a configuration and tensor names of its own."""
    folders = [expanded(weights), expanded(weights) / "full_model"] if weights else []
    folder = next((str(one) for one in folders if (one / "config.json").is_file()), "")
    folder = weights.removeprefix(PREFIX) if weights.startswith(PREFIX) else folder
    if folder:
        raise ConfigError(
            f"--model.weights {weights} is a model of transformers, not a state dict of the transformer.",
            f"--model.name {PREFIX}{folder} without --model.weights",
        )


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
    given = _arguments(section, factory, facts)
    build = _Factory(section.name, factory, given)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        trial = build()
    check_model(trial, section.name, facts)
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
        flag = f"--model.name {self.path}"
        meta = torch.get_default_device().type == "meta"
        try:
            model = self.factory(**self.arguments)
        except ConfigError:
            raise
        except Exception as error:
            hint = _on_meta(error) if meta else "the error is on that line of the factory"
            raise ConfigError(f"{flag} failed: {blame(error)}.", hint) from error
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"{flag} returned a {type(model).__name__}, not an nn.Module.", "return the model itself"
            )
        if isinstance(model, nn.DataParallel) or uncompiled(model) is not model:
            # Their forward takes any arguments: which data the model gets could not be read from it.
            raise ConfigError(
                f"{flag} returned its model inside of {type(model).__name__}.",
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
