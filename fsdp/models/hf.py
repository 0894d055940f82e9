"""Models of transformers from a folder with config.json: `--model.name hf:FOLDER` or `hf:ORG/NAME`.

The class is chosen from config.json's `architectures` or by --model.args.head; other arguments replace fields
of config.json. Code from a folder or a hub is never run, and nothing is downloaded. Not here: the names under
which the folder stores weights (hf_weights.py), or reading them (fsdp/checkpoint/pretrained.py).
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp.base.errors import ConfigError
from fsdp.base.proc import SETTINGS, regular_text
from fsdp.base.torch_private.core import prepare_torchvision
from fsdp.models.factory import blame, check_model, check_no_adapter, find_folder, unknown_argument
from fsdp.models.hf_weights import (
    draw_missing,
    initialise,
    plan_names,
    reverted,
    saved_pieces,
)

HEADS = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "classification": "SEQUENCE_CLASSIFICATION",
    "image-classification": "IMAGE_CLASSIFICATION",
}
"""--model.args.head, and the name of transformers' mapping from a configuration to its class."""
ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
EXPERTS = ("eager", "batched_mm", "grouped_mm")
KERNELS = {"attn_implementation": ATTENTION, "experts_implementation": EXPERTS}
DTYPE_FIELDS = ("dtype", "torch_dtype")
"""The first one that is set counts, as in transformers."""


@dataclass(frozen=True, kw_only=True)
class PretrainedFolder:
    """A folder of save_pretrained, with the class and configuration that it is read with."""

    name: str
    folder: Path
    cls: type[Any]
    config: Any
    new_head: bool
    """--model.args.head is given: weights that the folder lacks outside the base model are drawn."""

    @property
    def flag(self) -> str:
        return f"--model.name {self.name}"

    @property
    def class_name(self) -> str:
        return self.cls.__name__

    def build(self) -> nn.Module:
        """Builds the model on torch's default device, in torch's default dtype."""
        try:
            # A copy: a run changes use_cache in it.
            cls: Any = self.cls
            built: nn.Module = _with_buffers(cls)(copy.deepcopy(self.config))
        except Exception as error:
            raise ConfigError(
                f"--model.name {self.name}: {self.cls.__name__} cannot be built: {blame(error)}.",
                f"look at {self.folder / 'config.json'} and --model.args",
            ) from error
        return built

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that config.json names."""
        named = self.config.dtype
        return getattr(torch, named, None) if isinstance(named, str) else named

    plan_names = staticmethod(plan_names)
    saved_pieces = staticmethod(saved_pieces)
    reverted = staticmethod(reverted)

    def draw_missing(self, name: str, seed: int) -> torch.Tensor:
        return draw_missing(self.build, name, seed)

    def saved_layer(self, name: str) -> str:
        return name

    def config_json(self, dtype: torch.dtype) -> str:
        config = copy.deepcopy(self.config)
        config.architectures, config.dtype = [self.class_name], str(dtype).removeprefix("torch.")
        text: str = config.to_json_string()
        return text


def resolve_folder(name: str, args: Mapping[str, Any], facts: Mapping[str, Any]) -> PretrainedFolder:
    """Reads `hf:FOLDER` or `hf:ORG/NAME`; every error in it is a ConfigError."""
    folder = find_folder(name)
    prepare_torchvision()
    try:
        importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--model.name {name} needs {error.name}, which is not installed.", "pip install transformers"
        ) from None
    fields = _read_config(name, folder)
    rest = dict(args)
    head = rest.pop("head", None)
    config = _configuration(name, fields, rest)
    cls = _class_for(name, config, fields, head)
    _check_classes(name, cls, config, facts)
    source = PretrainedFolder(name=name, folder=folder, cls=cls, config=config, new_head=head is not None)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        trial = source.build()
    check_model(trial, name, facts)
    return source


# ---------------------------------------------------------------- config.json


def _read_config(name: str, folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        fields = json.loads(regular_text(file, SETTINGS))
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        check_no_adapter(folder, "--model.name", name)
        exported = folder / "full_model"
        is_export = (exported / "config.json").is_file()
        hint = f"--model.name hf:{exported}" if is_export else "a folder that save_pretrained wrote"
        line = f"--model.name {name}: {file} cannot be read: {error}."
        raise ConfigError(line, hint, scope="node") from None
    if (quantized := fields.get("quantization_config")) is not None:
        method = quantized.get("quant_method", "") if isinstance(quantized, dict) else quantized
        raise ConfigError(
            f"--model.name {name}: its weights are quantized ({method}); FSDP trains floating-point ones.",
            "name a folder with the weights before quantization",
        )
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in _auto("configuration_auto").CONFIG_MAPPING:
        own = " It names code of its own (auto_map), which is not run." if "auto_map" in fields else ""
        raise ConfigError(
            f"--model.name {name}: the installed transformers has no model_type {kind!a}.{own}",
            "pip install -U transformers, or --model.name my_module:factory for code that you wrote",
        )
    return fields


def _auto(module: str) -> Any:
    return importlib.import_module(f"transformers.models.auto.{module}")


def _configuration(name: str, fields: dict[str, Any], overrides: dict[str, Any]) -> Any:
    """config.json with --model.args over it. Kernels are chosen by flags alone: a name may be a hub's."""
    kernels = {field: overrides.pop(field) for field in KERNELS if field in overrides}
    for field, value in kernels.items():
        if value not in KERNELS[field]:
            raise ConfigError(
                f"--model.args.{field} {value} is not one of {', '.join(KERNELS[field])}.",
                f"--model.args.{field} {KERNELS[field][1]}",
            )
    cls = _auto("configuration_auto").CONFIG_MAPPING[fields["model_type"]]
    try:
        known = cls.from_dict(_plain(fields))
        for field in overrides:
            if field.startswith("_") or field in ("auto_map", "model_type") or not hasattr(known, field):
                raise unknown_argument(
                    field, [*known.to_dict(), *KERNELS, "head"], "--model.args", f"--model.name {name}"
                )
        return cls.from_dict(_plain(fields) | overrides, **kernels)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"--model.name {name}: its config.json with --model.args is no {cls.__name__}: {blame(error)}.",
            "look at config.json and --model.args",
        ) from error


def _plain(fields: Any) -> Any:
    """The fields without those that name code or kernels, at any depth; `torch.bfloat16` as `bfloat16`."""
    if isinstance(fields, list):
        return [_plain(item) for item in fields]
    if not isinstance(fields, dict):
        return fields
    barred = ("auto_map", "custom_pipelines", "use_kernels", "kernel_config")
    return {
        key: value.removeprefix("torch.") if key in DTYPE_FIELDS and isinstance(value, str) else _plain(value)
        for key, value in fields.items()
        if key not in barred and not str(key).removeprefix("_").startswith(tuple(KERNELS))
    }


# ---------------------------------------------------------------- the class


def _class_for(name: str, config: Any, fields: Mapping[str, Any], head: object) -> type[Any]:
    from transformers import PreTrainedModel

    classes = {head: _first(_mapping(head).get(type(config), None)) for head in HEADS}
    fitting = {head: cls for head, cls in classes.items() if cls is not None}
    hint = f"--model.args.head {next(iter(fitting))}" if fitting else "--model.name my_module:factory"
    if head is not None:
        if head in fitting:
            return fitting[str(head)]
        heads = ", ".join(fitting) or "none"
        raise ConfigError(
            f"--model.name {name}: a {config.model_type} has no head {head}, but {heads}.", hint
        )
    listed = fields.get("architectures")
    architecture = str(listed[0]) if isinstance(listed, list) and listed else ""
    transformers = importlib.import_module("transformers")
    named: Any = getattr(transformers, architecture, None) if architecture.isidentifier() else None
    if not (isinstance(named, type) and issubclass(named, PreTrainedModel)):
        fault = f"config.json names {architecture!a}, which transformers has not"
    elif named is _first(_auto("modeling_auto").MODEL_MAPPING.get(type(config), None)):
        fault = f"{architecture} returns neither logits nor a loss"
    else:
        return named
    raise ConfigError(f"--model.name {name}: {fault}.", hint)


def _mapping(head: str) -> Any:
    return getattr(_auto("modeling_auto"), f"MODEL_FOR_{HEADS[head]}_MAPPING")


def _first(classes: Any) -> Any:
    return classes[0] if isinstance(classes, tuple) else classes


def _check_classes(name: str, cls: type[Any], config: Any, facts: Mapping[str, Any]) -> None:
    """Checks that the model has as many classes as the data."""
    classes = facts.get("num_classes")
    if classes is not None and "Classification" in cls.__name__ and config.num_labels < classes:
        head = next((one for one in HEADS if type(config) in _mapping(one) and "class" in one), "")
        raise ConfigError(
            f"--model.name {name} has {config.num_labels} classes, the data {classes}.",
            f"--model.args.head {head} --model.args.num_labels {classes}",
        )


# ---------------------------------------------------------------- values that no file holds


@functools.cache
def _with_buffers(cls: Any) -> Any:
    """The class with init_buffers(); its name stays, by which transformers chooses the loss."""
    return type(cls.__name__, (cls,), {"init_buffers": _fill_buffers, "__module__": cls.__module__})


def _fill_buffers(model: Any, device: torch.device) -> None:
    """Fills the buffers that no state dict holds, as transformers does when it loads, and no others."""
    saved = model.state_dict().keys()
    unsaved = (name for name, _ in model.named_buffers() if name not in saved)
    with torch.no_grad():
        for path in dict.fromkeys(name.rpartition(".")[0] for name in unsaved):
            initialise(model, path, {name for name in saved if name.startswith(f"{path}." if path else "")})
