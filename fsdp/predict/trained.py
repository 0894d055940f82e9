"""A run directory's model, in training's dtype, with its data: in one process, or sharded over ranks.

The tensors are those of RUN/full_model; sharded, each rank reads its own rows, or those of the newest whole
checkpoint if there is no export. Not here: predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp import config as configuration
from fsdp.base.digest import widest_floating
from fsdp.base.errors import CheckpointError, ConfigError, TrainingError
from fsdp.checkpoint import inspect, metadata
from fsdp.checkpoint.full_state import INDEX_FILE, SINGLE_FILE, TORCH_FILE, newest_export, open_full_state
from fsdp.checkpoint.pretrained import PretrainedWeights
from fsdp.checkpoint.restore import load_weights
from fsdp.checkpoint.store import open_store
from fsdp.config import Config, MeshSection, check_store
from fsdp.data import DataSet, build_dataset
from fsdp.data.registry import with_model_tokenizer
from fsdp.dist.collectives import ObjectGroup, broadcast_object
from fsdp.dist.env import DistEnv, pick_device
from fsdp.dist.mesh import MeshSizes, build_mesh
from fsdp.dist.process_group import process_group
from fsdp.models import ModelSpec, resolve
from fsdp.models.cross_entropy import read_output
from fsdp.models.factory import PREFIX
from fsdp.models.hf import KERNELS
from fsdp.models.hf_settings import select_experts_kernel, turn_caches_off
from fsdp.models.init import fill_buffers, seeded, to_empty
from fsdp.models.units import all_names
from fsdp.parallel.materialize import materialize
from fsdp.parallel.shard import Sharded, resolve_dtypes, shard_model, sharding_of
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
    device: torch.device
    from_rank_0: Callable[[int], int] | None = None
    """Rank 0's number on every rank, for a model sharded over ranks."""

    def logits(self, inputs: Tensor) -> Tensor:
        """The model's logits, on its device."""
        dtype = widest_floating(p.dtype for p in self.model.parameters())
        inputs = inputs.to(self.device, dtype if inputs.is_floating_point() else None)
        # FSDP2 gathers no parameters in inference mode
        with torch.inference_mode() if self.from_rank_0 is None else torch.no_grad():
            output = read_output(self.model(inputs))
        logits = output.logits
        if logits is None or output.loss is not None:
            reason = f"--model.name {self.config.model.name} returns a loss and no logits."
            raise ConfigError(reason, "return logits if no targets are given")
        if logits.isnan().any():
            reason = f"{self.run}: the model's logits are not numbers (nan)."
            raise TrainingError(reason, f"python -m fsdp.report {self.run} shows where training diverged")
        return logits


# ---------------------------------------------------------------- one process


def open_run(run: Path, flags: Sequence[str] = (), trusted: Collection[str] = ()) -> TrainedModel:
    """`flags` override the run's configuration, such as the folder of its data. Code that it names is
    imported only if it is in `trusted`.
    """
    config = read_config(run, flags, trusted)
    device, data = pick_device(0), _data_of(run, config)
    model = _load(run, config, data.info.facts).to(device).eval()
    dtype = resolve_dtypes(config.precision, device).param
    for parameter in model.parameters():  # buffers keep their dtype, as in FSDP's mixed precision
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    select_experts_kernel(model, dtype)
    return TrainedModel(run, config, model, data, device)


def read_config(run: Path, flags: Sequence[str], trusted: Collection[str]) -> Config:
    file = run / "config.toml"
    if not file.is_file():
        reason = f"{run} {'holds no config.toml' if run.is_dir() else 'does not exist'}."
        raise ConfigError(reason, "python -m fsdp.predict RUN, with the --run.dir of a run")
    # The export has the weights, and the sizes too if it is in the format of transformers or the run started
    # from a file: their source may no longer exist.
    source = str(configuration.read_recipe(str(file)).get("model.weights", ""))
    sized = (run / "full_model" / "config.json").is_file() or Path(source).suffix in WEIGHT_FILES
    forgotten = (*NOT_USED, "model.weights") if _has_export(run) and sized else NOT_USED
    return configuration.load_run_config(run, flags=flags, trusted=trusted, forgotten=forgotten)


def _data_of(run: Path, config: Config) -> DataSet:
    """The run's data with the tokenizer of its model: of the export if the model's folder is gone."""
    export = run / "full_model"
    data = with_model_tokenizer(config.data, config.model)
    if not data.tokenizer and (export / "tokenizer_config.json").is_file():
        data = with_model_tokenizer(data, replace(config.model, name=f"{PREFIX}{export}"))
    return build_dataset(data)


def _load(run: Path, config: Config, facts: Mapping[str, Any]) -> nn.Module:
    """The model with the export's tensors; a float64 master is not rounded."""
    spec, state = _open_export(run, config, facts)
    fills_itself = spec.knows_inits or spec.pretrained is not None
    # Of the run's seed: no file holds what a constructor draws beside what a state dict has.
    with seeded(config.run.seed), torch.device("meta" if fills_itself else "cpu"):
        model = spec.build()
    try:
        if not isinstance(state, PretrainedWeights):  # which has compared them
            _check_sizes(model, state)
        if fills_itself:  # memory is allocated once the sizes are known to fit
            to_empty(model, "cpu")
            fill_buffers(model, "cpu")
        turn_caches_off(model)
        pretrained = state if isinstance(state, PretrainedWeights) else None
        dtype = pretrained.dtype if pretrained else widest_floating(t.dtype for t in state.values())
        if spec.pretrained is None:
            model.to(dtype)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        model.load_state_dict(dict(state), strict=True)
    except RuntimeError as error:
        reason = "; ".join(str(error).splitlines()[:2])
        raise ConfigError(
            f"{run}/full_model does not fit the model of {run}/config.toml: {reason}",
            f"python -m fsdp.checkpoint {run} export, if [model.args] there are as the run wrote them",
        ) from None
    return model


def _check_sizes(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and name not in state:
            raise RuntimeError(f"the export has no {name}.")
        if isinstance(tensor, Tensor) and state[name].shape != tensor.shape:
            ours, theirs = list(tensor.shape), list(state[name].shape)
            raise RuntimeError(f"{name} is {theirs} in the export and {ours} in the model.")


def _has_export(run: Path) -> bool:
    return any((run / "full_model" / name).is_file() for name in (TORCH_FILE, INDEX_FILE, SINGLE_FILE))


def _open_export(
    run: Path, config: Config, facts: Mapping[str, Any]
) -> tuple[ModelSpec, Mapping[str, Tensor]]:
    """The model and the tensors of RUN/full_model, read when they are accessed."""
    folder, model = run / "full_model", config.model
    if not _has_export(run):
        reason = f"{run} has no exported model in {folder}."
        raise ConfigError(reason, f"python -m fsdp.checkpoint {run} export")
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


# ---------------------------------------------------------------- sharded over ranks


@contextmanager
def sharded_run(
    run: Path, flags: Sequence[str], trusted: Collection[str], env: DistEnv
) -> Iterator[TrainedModel]:
    """The model on all ranks, in the run's precision. Collective, as is each of its forwards."""
    config = read_config(run, flags, trusted)
    data = _data_of(run, config)
    if not _has_export(run) and config.lora.rank:
        reason = f"{run} has no exported model, and its checkpoints hold adapters alone."
        raise ConfigError(reason, f"python -m fsdp.checkpoint {run} export")
    spec, state = resolve(config.model, data.info.facts), None
    if _has_export(run):
        spec, state = _open_export(run, config, data.info.facts)
    with process_group(env, config.run.process_group_timeout_s):
        sharded = _sharded(config, spec, env)
        if state is None:
            _load_checkpoint(run, config, spec, sharded)
        else:
            _load_export(run, config, spec, state, sharded, env.rank)
        sharded.root.eval()
        yield TrainedModel(run, config, sharded.root, data, env.device, from_rank_0=broadcast_object)


def _sharded(config: Config, spec: ModelSpec, env: DistEnv) -> Sharded:
    """Compilation, recomputation and offload of the training run do not apply."""
    sizes = MeshSizes("fsdp", 1, env.world_size)
    plain = Config(mesh=MeshSection(strategy="fsdp"), precision=config.precision)
    sharding = sharding_of(plain, sizes, env.device)
    # frozen parameters may have their own dtype
    model = model_of(Config(model=config.model, run=config.run), spec, sharding.dtypes)
    return shard_model(model, sharding, build_mesh(sizes, env.device, config.run.process_group_timeout_s))


@dataclass(frozen=True)
class StateRows:
    """Rows of tensors in mapped files. A tied tensor may have any of its names there."""

    run: Path
    state: Mapping[str, Tensor]
    names: Mapping[str, list[str]]

    def rows(self, name: str, first: int, last: int) -> Tensor:
        stored = next((other for other in self.names.get(name, [name]) if other in self.state), None)
        if stored is None:
            reason = f"{self.run}/full_model has no {name}."
            raise ConfigError(reason, f"python -m fsdp.checkpoint {self.run} export")
        tensor = self.state[stored]
        return tensor[first:last] if tensor.dim() else tensor


def _load_export(
    run: Path, config: Config, spec: ModelSpec, state: Mapping[str, Tensor], sharded: Sharded, rank: int
) -> None:
    """Each rank reads its rows; a model with buffers that no file holds is built on rank 0 for those."""
    root = sharded.root
    rows: Any = state if hasattr(state, "rows") else StateRows(run, state, all_names(root))
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
    checkpoint = metadata.open_one(store, newest.folder, newest.manifest)
    load_weights(checkpoint, sharded.root, group, verify=config.checkpoint.verify)
