"""A run directory's model in one process, in training's dtype, with its data. Not here: predictions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp import config as configuration
from fsdp.base.dtypes import widest_floating
from fsdp.base.errors import ConfigError, TrainingError, message_line
from fsdp.checkpoint.full_state import INDEX_FILE, TORCH_FILE, newest_export, open_full_state
from fsdp.checkpoint.pretrained import SINGLE_FILE, PretrainedWeights
from fsdp.config import Config
from fsdp.data import DataSet, build_dataset
from fsdp.data.model_tokenizer import with_model_tokenizer
from fsdp.dist.env import pick_device
from fsdp.models import ModelSpec, resolve
from fsdp.models.experts import select_experts_kernel
from fsdp.models.hf import KERNELS
from fsdp.models.hub import PREFIX
from fsdp.models.kv_cache import turn_caches_off
from fsdp.models.model_output import loss_or_logits
from fsdp.models.unsharded import fill_buffers, seeded, to_empty
from fsdp.parallel.shard import resolve_dtypes

# Fields that predictions do not use, and whose files may no longer exist.
FILES = (".pt", ".pth", ".bin", ".safetensors")
NOT_USED = ("checkpoint.resume", "ray.", "mesh.")


@dataclass(frozen=True)
class TrainedModel:
    run: Path
    config: Config
    model: nn.Module
    data: DataSet
    device: torch.device
    from_rank_0: Callable[[int], int] | None = None
    """Rank 0's number on every rank, for a model sharded over ranks."""

    def logits(self, inputs: Tensor) -> Tensor:
        """The model's logits, on its device."""
        dtype = widest_floating(p.dtype for p in self.model.parameters())
        inputs = inputs.to(self.device, dtype if inputs.is_floating_point() else None)
        # FSDP2 gathers no parameters in inference mode
        with torch.inference_mode() if self.from_rank_0 is None else torch.no_grad():
            _, logits = loss_or_logits(self.model(inputs))
        if logits is None:
            raise ConfigError(
                f"--model.name {self.config.model.name} returns a loss and no logits.",
                "return logits if no targets are given",
            )
        if logits.isnan().any():
            raise TrainingError(
                f"{self.run}: the model's logits are not numbers (nan).",
                f"python -m fsdp.report {self.run} shows where training diverged",
            )
        return logits


def open_run(run: Path, flags: Sequence[str] = (), trusted: Collection[str] = ()) -> TrainedModel:
    """`flags` override the run's configuration, such as the place of its data. Code that it names is
    imported only if it is in `trusted`.
    """
    config = read_config(run, flags, trusted)
    device = pick_device(0)
    data = data_of(run, config)
    model = _load(run, config, data.info.facts)
    model.to(device).eval()
    dtype = resolve_dtypes(config.precision, device).param
    for parameter in model.parameters():  # buffers keep their dtype, as in FSDP's mixed precision
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    select_experts_kernel(model, dtype)
    return TrainedModel(run, config, model, data, device)


def data_of(run: Path, config: Config) -> DataSet:
    """The run's data with the tokenizer of its model: of the export if the model's folder is gone."""
    whole = run / "full_model"
    data = with_model_tokenizer(config.data, config.model)
    if not data.tokenizer and (whole / "tokenizer_config.json").is_file():
        data = with_model_tokenizer(data, replace(config.model, name=f"{PREFIX}{whole}"))
    return build_dataset(data)


def read_config(run: Path, flags: Sequence[str], trusted: Collection[str]) -> Config:
    file = run / "config.toml"
    if not file.is_file():
        what = "holds no config.toml" if run.is_dir() else "does not exist"
        raise ConfigError(f"{run} {what}.", "python -m fsdp.predict RUN, with the --run.dir of a run")
    # The export has the weights, and the sizes too if it is in the format of transformers or the run started
    # from a file: their source may no longer exist.
    source = str(configuration.read_recipe(str(file)).get("model.weights", ""))
    sized = (run / "full_model" / "config.json").is_file() or Path(source).suffix in FILES
    whole = has_export(run) and sized
    forgotten = (*NOT_USED, "model.weights") if whole else NOT_USED
    return configuration.load_run_config(run, flags=flags, trusted=trusted, forgotten=forgotten)


def _load(run: Path, config: Config, facts: Mapping[str, Any]) -> nn.Module:
    spec, state = open_export(run, config, facts)
    try:
        model = _built(run, config, spec, state)
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:  # torch's, of sizes beyond it
        raise ConfigError(
            f"{run}/config.toml: its model cannot be made: {message_line(error)}.",
            f"[model.args] in {run}/config.toml as the run wrote it",
        ) from None
    turn_caches_off(model)
    dtype = _floating(state)
    if spec.pretrained is None:
        model.to(dtype)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    try:
        model.load_state_dict(dict(state), strict=True)
    except RuntimeError as error:
        what = "; ".join(" ".join(line.split()) for line in str(error).splitlines()[1:2]) or str(error)
        raise _does_not_fit(run, what) from None
    return model


def _built(run: Path, config: Config, spec: ModelSpec, state: Mapping[str, Tensor]) -> nn.Module:
    """The model before its tensors are read; its memory is allocated once their sizes are known to fit."""
    fills_itself = spec.knows_inits or spec.pretrained is not None
    # Of the run's seed: no file holds what a constructor draws beside what a state dict has.
    with seeded(config.run.seed), torch.device("meta" if fills_itself else "cpu"):
        model = spec.build()
    if fills_itself:
        if not isinstance(state, PretrainedWeights):  # which has compared them
            _check_sizes(run, model, state)
        to_empty(model, "cpu")
        fill_buffers(model, "cpu")
    return model


def _check_sizes(run: Path, model: nn.Module, state: Mapping[str, Tensor]) -> None:
    tensors = {name: one for name, one in model.state_dict().items() if isinstance(one, Tensor)}
    for name, tensor in tensors.items():
        if name not in state:
            raise _does_not_fit(run, f"the export has no {name}.")
        if state[name].shape != tensor.shape:
            ours, theirs = list(tensor.shape), list(state[name].shape)
            raise _does_not_fit(run, f"{name} is {theirs} in the export and {ours} in the model.")


def _does_not_fit(run: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{run}/full_model does not fit the model of {run}/config.toml: {what}",
        f"python -m fsdp.checkpoint {run} export, if [model.args] there are as the run wrote them",
    )


def has_export(run: Path) -> bool:
    return any((run / "full_model" / name).is_file() for name in (TORCH_FILE, INDEX_FILE, SINGLE_FILE))


def open_export(
    run: Path, config: Config, facts: Mapping[str, Any]
) -> tuple[ModelSpec, Mapping[str, Tensor]]:
    """The model and the tensors of RUN/full_model, read when they are accessed."""
    folder = run / "full_model"
    if not has_export(run):
        raise ConfigError(
            f"{run} has no exported model in {folder}.", f"python -m fsdp.checkpoint {run} export"
        )
    model = config.model
    if (folder / "config.json").is_file():  # in the format of transformers; its source may no longer exist
        if model.name.startswith(PREFIX):
            kernels = {name: value for name, value in model.args.items() if name in KERNELS}
            model = replace(model, name=f"{PREFIX}{folder}", args=kernels, weights="")
        elif model.name == "transformer":
            model = replace(model, weights=str(folder))
    spec = resolve(model, facts)
    newest = newest_export(folder)
    by_torch = newest is not None and newest.name == TORCH_FILE
    if spec.pretrained is None or spec.pretrained.folder != folder or by_torch:
        return replace(spec, pretrained=None), open_full_state(folder)
    return spec, PretrainedWeights(spec.pretrained, config.run.seed)


def _floating(state: Mapping[str, Tensor]) -> torch.dtype:
    """The widest dtype of the saved parameters: a float64 master must not be rounded when loaded."""
    if isinstance(state, PretrainedWeights):
        return state.dtype
    return widest_floating(value.dtype for value in state.values())
