"""The model of a plan, and the shapes of one sample. The data need not be present.

If --data.name is at its default, or its files are elsewhere, samples of the model's own kind are used, with a
note. A data set that a run downloads is not downloaded: its samples have the same stand-in's shape.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fsdp.base.errors import ConfigError
from fsdp.config import DataSection, ModelSection
from fsdp.data import build_dataset
from fsdp.data.registry import with_model_tokenizer
from fsdp.data.types import DataSet
from fsdp.models import ModelSpec
from fsdp.models import resolve as resolve_model
from fsdp.models.hf import PretrainedFolder, resolve_folder
from fsdp.models.hub import PREFIX
from fsdp.run.job import meta_model
from fsdp.tokenize.sources import is_pattern, is_remote

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
CONVOLVED = 0.1
"""Their share of the parameters from which on they are more than a transformer's first layer."""
Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Subject:
    spec: ModelSpec
    sample: Mapping[str, Shape]
    tokens_per_sample: int
    note: str
    """Names a stand-in for the data; empty for the data set itself."""

    @functools.cached_property
    def scratch(self) -> str:
        """Modules whose kernels take memory that no tensor shows; empty without any."""
        model = meta_model(self.spec)
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            return "recurrent layers"
        convolved = sum(
            parameter.numel()
            for module in model.modules()
            if isinstance(module, CONVOLUTIONS)
            for parameter in module.parameters(recurse=False)
        )
        many = convolved > CONVOLVED * sum(parameter.numel() for parameter in model.parameters())
        return "convolutions" if many else ""


def subject_of(model: ModelSection, data: DataSection) -> Subject:
    return _subject(_Sections(model, data))


@dataclass(frozen=True)
class _Sections:
    model: ModelSection
    data: DataSection

    def __hash__(self) -> int:
        return hash(str(self))  # sections hold dictionaries and have no hash of their own


@functools.lru_cache(maxsize=16)
def _subject(sections: _Sections) -> Subject:
    dataset, note = _dataset(sections.model, sections.data)
    spec = resolve_model(sections.model, dataset.info.facts)
    batch = dataset.train.batch(np.arange(1))
    sample = {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in batch.items()}
    return Subject(spec, sample, dataset.info.tokens_per_sample, note)


def _dataset(model: ModelSection, data: DataSection) -> tuple[DataSet, str]:
    stand_in = _stand_in(model, data)
    if not data.sources and data.name in ("", "digits", "fashion_mnist") and stand_in is not None:
        return build_dataset(stand_in), ""
    try:
        return build_dataset(with_model_tokenizer(data, model)), ""
    except ConfigError as error:
        if stand_in is None or not (data.dir or data.sources or _is_place(data.name)):
            raise
        words = stand_in.args.get("vocab_size")
        flag = " (--model.args.vocab_size)" if model.name == "transformer" else ""
        kind = f"a vocabulary of {words:,}{flag}" if words else "samples of its kind"
        return build_dataset(stand_in), f"{', '.join(data.names)} is not here ({error}); planned with {kind}"


def _is_place(name: str) -> bool:
    """Whether it is the name of files, which may lie on the machine that is planned for."""
    path = ":" not in name and (os.sep in name or is_pattern(name) or bool(Path(name).suffix))
    return path or is_remote(name)


def _stand_in(model: ModelSection, data: DataSection) -> DataSection | None:
    if model.name == "transformer":
        from fsdp.models.transformer import PRESETS

        args: dict[str, Any] = {
            "vocab_size": 256,
            **PRESETS.get(model.preset or next(iter(PRESETS)), {}),
            **model.args,
        }
        return DataSection(
            name="synthetic", seq_len=data.seq_len, args={"kind": "tokens", "vocab_size": args["vocab_size"]}
        )
    if model.name.startswith(PREFIX):
        return _pretrained_stand_in(resolve_folder(model.name, model.args, {}), model, data)
    if model.name == "vit" and (model.preset or model.args):
        from fsdp.models.vit import PRESETS as SIZES

        preset: dict[str, Any] = {str(k): v for k, v in SIZES.get(model.preset or "small", {}).items()}
        given = {**preset, **model.args}
        kept: dict[str, Any] = {
            name: given[name] for name in ("image_size", "channels", "num_classes") if name in given
        }
        return DataSection(name="synthetic", args={"kind": "images", **kept})
    return None


def _pretrained_stand_in(
    found: PretrainedFolder, model: ModelSection, data: DataSection
) -> DataSection | None:
    """Tokens for a causal model, images for a classifier of images; others read labels of the data's own."""
    config, kind = found.config, found.cls.__name__
    if kind.endswith(("ForCausalLM", "LMHeadModel")):
        words = config.get_text_config().vocab_size
        return DataSection(
            name="synthetic", seq_len=data.seq_len, args={"kind": "tokens", "vocab_size": words}
        )
    if kind.endswith("ForImageClassification") and isinstance(config.image_size, int):
        args = {"image_size": config.image_size, "channels": config.num_channels}
        return DataSection(
            name="synthetic", args={"kind": "images", "num_classes": config.num_labels, **args}
        )
    if not data.name:
        raise ConfigError(
            f"--model.name {model.name}: a {kind} reads samples that need a --data.name.",
            "--data.name my_data:build for a Dataset with input_ids and labels",
        )
    return None
