"""The model of a plan, and the shapes of one sample. The data need not be present.

If --data.name is at its default, or its files are elsewhere, samples of the model's own kind are used, with a
note. A data set that a run downloads is not downloaded: its samples have the same stand-in's shape.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fsdp.base.errors import ConfigError
from fsdp.config import Config, DataSection, ModelSection
from fsdp.data import build_dataset
from fsdp.data.registry import with_model_tokenizer
from fsdp.data.types import DataSet
from fsdp.memory.account import resting_bytes
from fsdp.models import ModelSpec
from fsdp.models import resolve as resolve_model
from fsdp.models.factory import PREFIX
from fsdp.models.hf import resolve_folder
from fsdp.parallel.shard import resolve_dtypes
from fsdp.run.job import meta_model, model_of
from fsdp.tokenize.rows import is_pattern, is_remote

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
SCRATCH_SHARE = 0.1
"""Part of the parameters from which on convolutions are more than a transformer's first layer."""


@dataclass(frozen=True)
class Subject:
    spec: ModelSpec
    sample: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    tokens_per_sample: int
    note: str
    """Names a stand-in for the data; empty for the data set itself."""
    has_scratch: bool
    """Whether the model's kernels take memory on CUDA that no tensor shows: those of convolutions and of
    recurrent layers.
    """


_KNOWN: dict[str, Subject] = {}


def subject_of(model: ModelSection, data: DataSection) -> Subject:
    key = f"{model} {data}"  # sections hold dictionaries and have no hash of their own
    if key not in _KNOWN:
        dataset, note = _dataset(model, data)
        spec = resolve_model(model, dataset.info.facts)
        batch = dataset.train.batch(np.arange(1))
        sample = {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in batch.items()}
        scratch = _has_scratch(meta_model(spec))
        _KNOWN[key] = Subject(spec, sample, dataset.info.tokens_per_sample, note, scratch)
    return _KNOWN[key]


def _has_scratch(model: nn.Module) -> bool:
    def count(*kinds: type[nn.Module]) -> int:
        modules = (module for module in model.modules() if isinstance(module, kinds))
        return sum(p.numel() for module in modules for p in module.parameters(recurse=False))

    return bool(count(nn.RNNBase)) or count(*CONVOLUTIONS) > SCRATCH_SHARE * count(nn.Module)


def parameter_bytes(config: Config) -> float:
    """Parameters, gradients and optimizer of the whole model: what shards divide."""
    model = model_of(config, subject_of(config.model, config.data).spec)
    dtypes = resolve_dtypes(config.precision, torch.device("cpu"))
    return float(resting_bytes(config.optim, model, dtypes.master, dtypes.frozen).total)


# ---------------------------------------------------------------- samples


def _dataset(model: ModelSection, data: DataSection) -> tuple[DataSet, str]:
    stand_in = _stand_in(model, data)
    if not data.sources and data.name in ("", "digits", "fashion_mnist") and stand_in is not None:
        return build_dataset(stand_in), ""
    try:
        return build_dataset(with_model_tokenizer(data, model)), ""
    except ConfigError as error:
        if stand_in is None or not (data.dir or data.sources or _names_files(data.name)):
            raise
        words = stand_in.args.get("vocab_size")
        flag = " (--model.args.vocab_size)" if model.name == "transformer" else ""
        kind = f"a vocabulary of {words:,}{flag}" if words else "samples of its kind"
        return build_dataset(stand_in), f"{', '.join(data.names)} is not here ({error}); planned with {kind}"


def _names_files(name: str) -> bool:
    """Whether they may lie on the machine that is planned for."""
    path = ":" not in name and (os.sep in name or is_pattern(name) or bool(Path(name).suffix))
    return path or is_remote(name)


def _stand_in(model: ModelSection, data: DataSection) -> DataSection | None:
    """Tokens for a causal model, images for a classifier of images; None for a model that reads others."""
    if model.name == "transformer":
        from fsdp.models.transformer import PRESETS

        preset = PRESETS.get(model.preset or next(iter(PRESETS)), {})
        return _tokens(data, {"vocab_size": 256, **preset, **model.args}["vocab_size"])
    if model.name == "vit" and (model.preset or model.args):
        from fsdp.models.vision import PRESETS as SIZES

        sizes: dict[str, Any] = {**SIZES.get(model.preset or "small", {}), **model.args}
        return _images({n: sizes[n] for n in ("image_size", "channels", "num_classes") if n in sizes})
    if not model.name.startswith(PREFIX):
        return None
    folder = resolve_folder(model.name, model.args, {})
    config, kind = folder.config, folder.cls.__name__
    if kind.endswith(("ForCausalLM", "LMHeadModel")):
        return _tokens(data, config.get_text_config().vocab_size)
    if kind.endswith("ForImageClassification") and isinstance(config.image_size, int):
        sizes = {"image_size": config.image_size, "channels": config.num_channels}
        return _images({"num_classes": config.num_labels, **sizes})
    if not data.name:
        raise ConfigError(
            f"--model.name {model.name}: a {kind} reads samples that need a --data.name.",
            "--data.name my_data:build for a Dataset with input_ids and labels",
        )
    return None


def _tokens(data: DataSection, words: Any) -> DataSection:
    return DataSection(name="synthetic", seq_len=data.seq_len, args={"kind": "tokens", "vocab_size": words})


def _images(sizes: Mapping[str, Any]) -> DataSection:
    return DataSection(name="synthetic", args={"kind": "images", **sizes})
