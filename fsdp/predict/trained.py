"""A run directory's model, in training's dtypes, with its data: on one rank, or sharded over several.

The tensors are those of RUN/full_model, of which each rank reads its own rows; without an export those of the
newest whole checkpoint. Not here: predictions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp import config as configuration
from fsdp.base.devices import widest_floating
from fsdp.base.errors import CheckpointError, ConfigError, TrainingError
from fsdp.checkpoint import inspect
from fsdp.checkpoint.pretrained import (
    TORCH_FILE,
    PretrainedWeights,
    newest_export,
    open_full_state,
)
from fsdp.checkpoint.restore import load_weights
from fsdp.checkpoint.store import open_store
from fsdp.config import Config, MeshSection
from fsdp.config.trust import check_store, load_run_config
from fsdp.data import DataSet, build_dataset
from fsdp.data.registry import with_model_tokenizer
from fsdp.dist.collectives import ObjectGroup
from fsdp.dist.env import DistEnv
from fsdp.dist.mesh import MeshSizes, build_mesh
from fsdp.dist.process_group import process_group
from fsdp.models import ModelSpec, resolve
from fsdp.models.hf import KERNELS
from fsdp.models.loss import read_output
from fsdp.models.registry import PREFIX
from fsdp.models.units import all_names
from fsdp.parallel.materialize import check_state_fits, materialize
from fsdp.parallel.shard import Sharded, shard_model, sharding_of
from fsdp.run.job import model_of

WEIGHT_FILES = (".pt", ".pth", ".bin", ".safetensors")
NOT_USED = ("checkpoint.resume", "ray.", "mesh.")
"""Fields that predictions do not use, and whose files may no longer exist."""


@dataclass(frozen=True)
class TrainedModel:
    run: Path
    config: Config
    model: nn.Module
    data: DataSet
    env: DistEnv

    @torch.no_grad()
    def logits(self, inputs: Tensor) -> Tensor:
        """The model's logits, on its device. Collective."""
        dtype = widest_floating(p.dtype for p in self.model.parameters())
        output = read_output(
            self.model(inputs.to(self.env.device, dtype if inputs.is_floating_point() else None))
        )
        logits = output.logits
        if logits is None or output.loss is not None:
            reason = f"--model.name {self.config.model.name} returns a loss and no logits."
            raise ConfigError(reason, "return logits if no targets are given")
        if logits.isnan().any():
            reason = f"{self.run}: the model's logits are not numbers (nan)."
            raise TrainingError(reason, f"python -m fsdp.report {self.run} shows where training diverged")
        return logits


@contextmanager
def open_run(
    run: Path, env: DistEnv, flags: Sequence[str] = (), trusted: Collection[str] = ()
) -> Iterator[TrainedModel]:
    """`flags` override the run's configuration, such as the folder of its data. Code that it names is
    imported only if it is in `trusted`. Collective.
    """
    config = read_config(run, flags, trusted)
    data = _data_of(run, config)
    if newest_export(run / "full_model") is not None:
        spec, state = _open_export(run, config, data.info.facts)
    elif config.lora.rank:
        reason = f"{run} has no exported model, and its checkpoints hold adapters alone."
        raise ConfigError(reason, f"python -m fsdp.checkpoint {run} export")
    else:
        spec, state = resolve(config.model, data.info.facts), None
    timeout_s = config.run.process_group_timeout_s
    # One rank needs no units: any module predicts there.
    sizes = MeshSizes("fsdp" if env.world_size > 1 else "ddp", 1, env.world_size)
    plain = Config(mesh=MeshSection(strategy=sizes.strategy), precision=config.precision)
    # Compilation, recomputation and offload of the training run do not apply.
    sharding = sharding_of(plain, sizes, env.device)
    with process_group(env, timeout_s):
        model = model_of(Config(model=config.model, run=config.run), spec, sharding.dtypes)
        if state is not None and not isinstance(state, PretrainedWeights):  # which has compared them
            check_state_fits(state, all_names(model), model, f"{run}/full_model")
        sharded = shard_model(model, sharding, build_mesh(sizes, env.device, timeout_s))
        if state is None:
            _load_checkpoint(run, config, spec, sharded)
        else:
            _load_export(config, spec, state, sharded, env.rank)
        if env.world_size == 1:
            for parameter in model.parameters():  # buffers keep their dtype, as in FSDP's mixed precision
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(sharding.dtypes.param)
        yield TrainedModel(run, config, model.eval(), data, env)


def read_config(run: Path, flags: Sequence[str], trusted: Collection[str]) -> Config:
    file = run / "config.toml"
    if not file.is_file():
        reason = f"{run} {'holds no config.toml' if run.is_dir() else 'does not exist'}."
        raise ConfigError(reason, "python -m fsdp.predict RUN, with the --run.dir of a run")
    # The export has the weights, and the sizes too if it is in the format of transformers or the run started
    # from a file: their source may no longer exist.
    source = str(configuration.read_recipe(str(file)).get("model.weights", ""))
    sized = (run / "full_model" / "config.json").is_file() or Path(source).suffix in WEIGHT_FILES
    forgotten = (*NOT_USED, "model.weights") if newest_export(run / "full_model") and sized else NOT_USED
    return load_run_config(run, flags=flags, trusted=trusted, forgotten=forgotten)


def _data_of(run: Path, config: Config) -> DataSet:
    """The run's data with the tokenizer of its model: of the export if the model's folder is gone."""
    export = run / "full_model"
    data = with_model_tokenizer(config.data, config.model)
    if not data.tokenizer and (export / "tokenizer_config.json").is_file():
        data = with_model_tokenizer(data, replace(config.model, name=f"{PREFIX}{export}"))
    return build_dataset(data)


# ---------------------------------------------------------------- its weights


def _open_export(
    run: Path, config: Config, facts: Mapping[str, Any]
) -> tuple[ModelSpec, Mapping[str, Tensor]]:
    """The model and the tensors of RUN/full_model, read when they are accessed."""
    folder, model = run / "full_model", config.model
    if (folder / "config.json").is_file():  # in the format of transformers; its source may no longer exist
        if model.name.startswith(PREFIX):
            kernels = {name: value for name, value in model.args.items() if name in KERNELS}
            model = replace(model, name=f"{PREFIX}{folder}", args=kernels, weights="")
        elif model.name == "transformer":
            model = replace(model, weights=str(folder))
    spec, newest = resolve(model, facts), newest_export(folder)
    by_torch = newest is not None and newest.name == TORCH_FILE
    if spec.pretrained is None or spec.pretrained.folder != folder or by_torch:
        return replace(spec, pretrained=None), open_full_state(folder)
    return spec, PretrainedWeights(spec.pretrained, config.run.seed)


@dataclass(frozen=True)
class StateRows:
    """Rows of tensors in mapped files. A tied tensor may have any of its names there."""

    state: Mapping[str, Tensor]
    names: Mapping[str, list[str]]

    def rows(self, name: str, first: int, last: int) -> Tensor:
        tensor = self.state[next(other for other in self.names[name] if other in self.state)]
        return tensor[first:last] if tensor.dim() else tensor


def _load_export(
    config: Config, spec: ModelSpec, state: Mapping[str, Tensor], sharded: Sharded, rank: int
) -> None:
    """Each rank reads its rows; a model with buffers that no file holds is built on rank 0 for those."""
    root = sharded.root
    rows: Any = state if hasattr(state, "rows") else StateRows(state, all_names(root))
    complete = hasattr(root, "init_buffers") or not set(dict(root.named_buffers())) - set(root.state_dict())
    materialize(
        sharded,
        spec=spec,
        seed=config.run.seed,
        init="shard",
        rank=rank,
        pretrained=(lambda: rows) if complete else None,
        weights=None if complete else lambda: state,
    )


def _load_checkpoint(run: Path, config: Config, spec: ModelSpec, sharded: Sharded) -> None:
    """Reads the newest whole checkpoint's shards, with checksums and digests."""
    store = open_store(check_store(run, config.checkpoint.dir or f"{run}/checkpoints"))
    group = ObjectGroup()
    newest = group.on_main(lambda: inspect.newest_whole(store))
    if newest is None:
        reason = f"{run} has neither an exported model nor a whole checkpoint."
        raise CheckpointError(reason, f"python -m fsdp.checkpoint {run} verify")
    materialize(sharded, spec=spec, seed=0, init="shard", rank=group.rank, restored=True)
    checkpoint = inspect.open_source(store, newest.folder, newest.manifest)
    load_weights(checkpoint, sharded.root, group, verify=config.checkpoint.verify)
