"""A run's model sharded over the ranks of torchrun or srun: each rank reads its own rows.

The tensors are those of RUN/full_model, or of the newest whole checkpoint if there is no export. Not here:
the model in one process (trained.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fsdp.base.errors import CheckpointError, ConfigError
from fsdp.checkpoint import inspect, load
from fsdp.checkpoint.open_store import open_store
from fsdp.checkpoint.restore import load_weights
from fsdp.checkpoint.run_source import RunSource
from fsdp.config import Config, MeshSection, check_store
from fsdp.dist.collectives import ObjectGroup, broadcast_object
from fsdp.dist.env import DistEnv
from fsdp.dist.mesh import MeshSizes, build_mesh
from fsdp.dist.process_group import process_group
from fsdp.models import ModelSpec, resolve
from fsdp.models.parameter_names import all_names
from fsdp.parallel.materialize import materialize
from fsdp.parallel.shard import Sharded, resolve_dtypes, shard_model
from fsdp.predict.trained import TrainedModel, data_of, has_export, open_export, read_config
from fsdp.run.job import model_of


@contextmanager
def sharded_run(
    source: RunSource, flags: Sequence[str], trusted: Collection[str], env: DistEnv
) -> Iterator[TrainedModel]:
    """The model on all ranks, in the run's precision. Collective, as is each of its forwards."""
    run = source.path
    config = read_config(run, flags, trusted)
    data = data_of(run, config)
    spec, state = _model_and_tensors(run, config, data.info.facts)
    with process_group(env, config.run.process_group_timeout_s):
        sharded = _sharded(config, spec, env)
        if state is None:
            _load_checkpoint(source, config, spec, sharded)
        else:
            _load_export(run, config, spec, state, sharded, env.rank)
        sharded.root.eval()
        yield TrainedModel(run, config, sharded.root, data, env.device, from_rank_0=broadcast_object)


def _model_and_tensors(
    run: Path, config: Config, facts: Mapping[str, Any]
) -> tuple[ModelSpec, Mapping[str, Tensor] | None]:
    if has_export(run):
        return open_export(run, config, facts)
    if config.lora.rank:
        raise ConfigError(
            f"{run} has no exported model, and its checkpoints hold adapters alone.",
            f"python -m fsdp.checkpoint {run} export",
        )
    return resolve(config.model, facts), None


def _sharded(config: Config, spec: ModelSpec, env: DistEnv) -> Sharded:
    """Compilation, recomputation and offload of the training run do not apply."""
    mesh = MeshSizes("fsdp", 1, env.world_size)
    plain = Config(model=config.model, run=config.run)
    return shard_model(
        # frozen parameters may have their own dtype
        model_of(plain, spec, resolve_dtypes(config.precision, env.device)),
        Config(mesh=MeshSection(strategy="fsdp"), precision=config.precision),
        sizes=mesh,
        mesh=build_mesh(mesh, env.device, config.run.process_group_timeout_s),
        device=env.device,
    )


@dataclass(frozen=True)
class StateRows:
    """Rows of tensors in mapped files. A tied tensor may have any of its names there."""

    run: Path
    state: Mapping[str, Tensor]
    names: Mapping[str, list[str]]

    def rows(self, name: str, first: int, last: int) -> Tensor:
        known = next((one for one in self.names.get(name, [name]) if one in self.state), None)
        if known is None:
            raise ConfigError(
                f"{self.run}/full_model has no {name}.", f"python -m fsdp.checkpoint {self.run} export"
            )
        tensor = self.state[known]
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


def _load_checkpoint(run: RunSource, config: Config, spec: ModelSpec, sharded: Sharded) -> None:
    """Reads the newest whole checkpoint's shards, with checksums and digests."""
    named = config.checkpoint.dir
    place = check_store(run.path, named) if named else run.checkpoints
    store, group = open_store(place), ObjectGroup()
    found = group.on_main(lambda: inspect.newest_whole(store))
    if found is None:
        raise CheckpointError(
            f"{run.place} has neither an exported model nor a whole checkpoint.",
            f"python -m fsdp.checkpoint {run.place} verify",
        )
    materialize(sharded, spec=spec, seed=0, init="shard", rank=group.rank, restored=True)
    checkpoint = load.open_one(store, found.folder, found.manifest)
    load_weights(checkpoint, sharded.root, group, verify=config.checkpoint.verify)
