"""A run directory's model in one process, in training's dtype, with its data. Not here: predictions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp import config as configuration
from fsdp.base.errors import ConfigError
from fsdp.checkpoint.full_state import INDEX_FILE, TORCH_FILE, open_full_state
from fsdp.checkpoint.pretrained import SINGLE_FILE, PretrainedWeights
from fsdp.config import Config
from fsdp.data import DataSet, build_dataset
from fsdp.dist.env import pick_device
from fsdp.models import resolve
from fsdp.models.hf import KERNELS, PREFIX, resolve_folder
from fsdp.models.kv_cache import turn_caches_off
from fsdp.models.loss import loss_or_logits
from fsdp.models.unsharded import fill_buffers, to_empty
from fsdp.parallel.shard import resolve_dtypes

# Fields that predictions do not use, and whose files may no longer exist.
NOT_USED = ("checkpoint.resume", "model.weights", "ray.", "mesh.")


@dataclass(frozen=True)
class TrainedModel:
    run: Path
    config: Config
    model: nn.Module
    data: DataSet
    device: torch.device

    def logits(self, inputs: Tensor) -> Tensor:
        """The model's logits, on its device."""
        dtype = next(self.model.parameters()).dtype
        inputs = inputs.to(self.device, dtype if inputs.is_floating_point() else None)
        with torch.inference_mode():
            _, logits = loss_or_logits(self.model(inputs))
        if logits is None:
            raise ConfigError(
                f"--model.name {self.config.model.name} returns a loss and no logits.",
                "return logits if no targets are given",
            )
        return logits


def open_run(run: Path, flags: Sequence[str] = (), trusted: Collection[str] = ()) -> TrainedModel:
    """`flags` override the run's configuration, such as the place of its data. Code that it names is
    imported only if it is in `trusted`.
    """
    config = read_config(run, flags, trusted)
    device = pick_device(0)
    data = build_dataset(config.data)
    model = _load(run, config, data.info.facts)
    model.to(device).eval()
    for parameter in model.parameters():  # buffers keep their dtype, as in FSDP's mixed precision
        parameter.data = parameter.data.to(resolve_dtypes(config.precision, device).param)
    return TrainedModel(run, config, model, data, device)


def read_config(run: Path, flags: Sequence[str], trusted: Collection[str]) -> Config:
    file = run / "config.toml"
    if not file.is_file():
        what = "holds no config.toml" if run.is_dir() else "does not exist"
        raise ConfigError(f"{run} {what}.", "python -m fsdp.predict RUN, with the --run.dir of a run")
    return configuration.load_run_config(run, flags=flags, trusted=trusted, forgotten=NOT_USED)


def _load(run: Path, config: Config, facts: Mapping[str, Any]) -> nn.Module:
    folder = run / "full_model"
    if not any((folder / name).is_file() for name in (TORCH_FILE, INDEX_FILE, SINGLE_FILE)):
        raise ConfigError(
            f"{run} has no exported model in {folder}.", f"python -m fsdp.checkpoint {run} export"
        )
    if config.model.name.startswith(PREFIX) and (folder / "config.json").is_file():
        return _load_folder(folder, config)
    state = dict(open_full_state(folder))
    spec = resolve(config.model, facts)
    with torch.device("meta" if spec.knows_inits else "cpu"):
        model = spec.build()
    if spec.knows_inits:
        to_empty(model, "cpu")
        fill_buffers(model, "cpu")
    model.to(_floating(state))
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        what = "; ".join(" ".join(line.split()) for line in str(error).splitlines()[1:2]) or str(error)
        raise ConfigError(
            f"{folder} does not fit the model of {run}/config.toml: {what}",
            f"python -m fsdp.checkpoint {run} export",
        ) from None
    return model


def _load_folder(folder: Path, config: Config) -> nn.Module:
    """The exported folder of a run of hf:FOLDER, whose source may no longer exist."""
    kernels = {name: value for name, value in config.model.args.items() if name in KERNELS}
    source = resolve_folder(f"{PREFIX}{folder}", kernels, {})
    weights = PretrainedWeights(source, config.run.seed)
    with torch.device("meta"):
        model = source.build()
    turn_caches_off(model)
    to_empty(model, "cpu")
    fill_buffers(model, "cpu")
    dtype = _floating(weights)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.load_state_dict(dict(weights), strict=True)
    return model


def _floating(state: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype of the saved parameters: a float64 master must not be rounded when loaded."""
    return next((value.dtype for value in state.values() if value.is_floating_point()), torch.float32)
