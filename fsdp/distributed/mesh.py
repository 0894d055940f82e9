"""Axis names, their sizes for a number of ranks, a rank's place on them, and the DeviceMesh.

Two axes have FSDP's names: dp_replicate (whole copies, gradients all-reduced) and dp_shard (one copy in
shards). The strategy becomes two sizes here; fsdp/shard/shard.py applies them.

    rank = ((replicate · shards + shard) · contexts + context) · tensors + tensor

Tensor ranks exchange activations in every layer, so they are neighbours; replicas are farthest apart. Expert
is no factor of the ranks: it divides those of one copy again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from fsdp.base.errors import ConfigError
from fsdp.config import MeshSection, TrainSection, reshard_policy

# torch is imported in build_mesh: a wrong mesh is reported without waiting for it.
if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

CUDA_BACKENDS = "cpu:gloo,cuda:nccl"
"""Of a rank's groups on CUDA: numbers on the host travel by gloo."""

Strategy = Literal["fsdp", "hsdp", "ddp"]


@dataclass(frozen=True)
class MeshSizes:
    """replicate × shard × context × tensor = ranks. `strategy` distinguishes ddp from hsdp with one shard."""

    strategy: Strategy
    replicate: int
    shard: int
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @functools.cached_property
    def data(self) -> int:
        """Ranks that read different rows."""
        return self.replicate * self.shard

    @functools.cached_property
    def ranks(self) -> int:
        return self.data * self.context * self.tensor

    @functools.cached_property
    def weight_shards(self) -> int:
        """Ranks over which FSDP divides a copy of the weights."""
        return self.shard * self.context

    def __str__(self) -> str:
        axes = {"context": self.context, "tensor": self.tensor, "expert": self.expert}
        more = "".join(f" {axis} {size}" for axis, size in axes.items() if size > 1)
        return f"{self.strategy} {self.replicate}×{self.shard}{more}"

    @functools.cached_property
    def equation(self) -> str:
        further = {"context": self.context, "tensor": self.tensor}
        named = {"replicate": self.replicate, "shard": self.shard}
        named |= {axis: size for axis, size in further.items() if size > 1}
        product = " × ".join(f"{axis} {size}" for axis, size in named.items()) + f" = {self.ranks} ranks"
        return product + (f", expert {self.expert} within a copy" if self.expert > 1 else "")


@dataclass(frozen=True)
class DataRank:
    """The slice of the global batch that a rank reads."""

    index: int
    count: int


@dataclass(frozen=True)
class RankPlace:
    """What a rank does of a step. Context and tensor ranks of one data index read the same rows."""

    data: DataRank
    context: int
    """The part of each row."""
    tensor: int
    """The part of each divided width."""


@dataclass(frozen=True)
class BatchPlan:
    """global_batch = micro_batch × accumulation × data ranks; the last micro-batch is padded if they do not
    divide.
    """

    global_batch: int
    micro_batch: int
    accumulation: int


def fewest_ranks(mesh: MeshSection) -> int:
    """The fewest ranks that have the sizes of the flags."""
    return max(1, mesh.replicate) * max(1, mesh.shard) * mesh.context * mesh.tensor


def resolve(mesh: MeshSection, world_size: int, num_nodes: int = 1) -> MeshSizes:
    """The sizes for this many ranks, or ConfigError with the whole equation."""
    data_ranks = max(1, world_size // (mesh.context * mesh.tensor))
    strategy = _strategy(mesh, data_ranks, num_nodes)
    replicate, shard = _fill(mesh, strategy, data_ranks, num_nodes)
    sizes = MeshSizes(strategy, replicate, shard, mesh.context, mesh.tensor, mesh.expert)
    if sizes.ranks != world_size:
        axes = [axis for axis in ("context", "tensor") if getattr(mesh, axis) > 1]
        fitting = "--mesh.replicate 0 --mesh.shard 0, which fit any number"
        if world_size % (mesh.context * mesh.tensor):
            fitting = " ".join(f"--mesh.{axis} 1" for axis in axes)
        fault = f"{sizes.equation}, but {world_size} were started."
        raise ConfigError(fault, f"{fitting}, or start {sizes.ranks}")
    _check_reshard(mesh, sizes.weight_shards)
    copy = sizes.ranks // sizes.replicate
    if copy % sizes.expert or (sizes.expert > 1 and sizes.expert % sizes.tensor):
        divisors = (n for n in range(2, sizes.expert + 1) if not copy % n and not n % sizes.tensor)
        fault = f"--mesh.expert {sizes.expert} does not divide the {copy} ranks of a copy of the weights "
        fault += f"({sizes.equation}), or is no multiple of tensor {sizes.tensor}."
        raise ConfigError(fault, f"--mesh.expert {max(divisors, default=1)}")
    return sizes


def _strategy(mesh: MeshSection, data_ranks: int, num_nodes: int) -> Strategy:
    if mesh.strategy != "auto":
        return mesh.strategy
    # Nodes of one rank have nothing to shard within.
    several = data_ranks > num_nodes > 1
    return "hsdp" if mesh.replicate > 1 or (several and not mesh.replicate and not mesh.shard) else "fsdp"


def _fill(mesh: MeshSection, strategy: Strategy, data_ranks: int, num_nodes: int) -> tuple[int, int]:
    if strategy == "ddp":
        return mesh.replicate or data_ranks, 1
    if strategy == "fsdp":
        return 1, mesh.shard or data_ranks
    replicate, shard = mesh.replicate, mesh.shard
    if not replicate and not shard:
        # Shard inside a node, where links are fast; a single node splits in two if its ranks are even.
        # Nodes with different numbers of ranks cannot each hold a whole copy.
        even = num_nodes > 1 and data_ranks % num_nodes == 0
        replicate = num_nodes if even else 2 if num_nodes == 1 and data_ranks % 2 == 0 else 1
    return (replicate or max(1, data_ranks // shard)), (shard or max(1, data_ranks // replicate))


def _check_reshard(mesh: MeshSection, shard: int) -> None:
    policy = reshard_policy(mesh.reshard_after_forward)
    if isinstance(policy, int) and not isinstance(policy, bool) and shard % policy:
        fits = max(n for n in range(1, policy + 1) if shard % n == 0 and n <= shard)
        fault = f"--mesh.reshard_after_forward {policy} does not divide shard {shard}."
        raise ConfigError(fault, f"--mesh.reshard_after_forward {fits}")


def place_of(sizes: MeshSizes, rank: int) -> RankPlace:
    rest, tensor = divmod(rank, sizes.tensor)
    data, context = divmod(rest, sizes.context)
    return RankPlace(DataRank(data, sizes.data), context, tensor)


def mesh_views(sizes: MeshSizes) -> dict[str, dict[str, int]]:
    """The meshes of a run, each over all ranks: their axes and sizes, outermost first.

    Context ranks hold equal weights: for FSDP they are more ranks to shard over. Axes of size 1 are left out,
    except the one that a model without others is applied to, and so are meshes that no flag asks for.
    """
    replicate, copy = sizes.replicate, sizes.ranks // sizes.replicate
    views = {"weights": {"dp_replicate": replicate, "dp_shard": sizes.weight_shards, "tensor": sizes.tensor}}
    if sizes.expert > 1:
        axes = {"dp_replicate": replicate, "expert_shard": copy // sizes.expert, "expert": sizes.expert}
        views["experts"] = axes
    if sizes.tensor > 1:
        views["copy"] = {"dp_replicate": replicate, "copy": copy}
    if sizes.context > 1:
        views["context"] = {"data": sizes.data, "context": sizes.context, "tensor": sizes.tensor}
    kept = ("dp_replicate",) if sizes.strategy == "ddp" else ("dp_shard", "expert_shard", "copy")
    return {
        view: {axis: size for axis, size in axes.items() if size > 1 or axis in kept}
        for view, axes in views.items()
    }


def build_mesh(
    sizes: MeshSizes, device: torch.device, timeout_s: float | None = None, view: str = "weights"
) -> DeviceMesh:
    """The mesh of one view. The group of an only axis is the default group.

    `timeout_s` sets the time-out of its groups, which do not inherit that of the default group; torch's own,
    with None or 0, is 10 minutes on NCCL, 30 on gloo.
    """
    from torch.distributed.device_mesh import init_device_mesh

    axes = mesh_views(sizes)[view]
    # Named backends, or torch splits the default group: of two backends it gives gloo NCCL's options, and in
    # the second run of a process it ends with SIGSEGV (pytorch #192106).
    named: Any = dict.fromkeys(axes, CUDA_BACKENDS) if device.type == "cuda" and len(axes) > 1 else None
    mesh = init_device_mesh(
        device.type, tuple(axes.values()), mesh_dim_names=tuple(axes), backend_override=named
    )
    if timeout_s:
        for axis in axes:
            mesh.get_group(axis).set_timeout(timedelta(seconds=timeout_s))
    return mesh


def plan_batch(train: TrainSection, ranks: int) -> BatchPlan:
    """Micro-batch and accumulation from the global batch. An uneven share of a rank is padded and masked."""
    share = -(-train.global_batch // ranks)
    micro = train.micro_batch or share
    if micro > share:
        over = f"--train.global_batch {train.global_batch} over {ranks} ranks is {share}."
        fault = f"--train.micro_batch {micro} is more than a rank's share: {over}"
        raise ConfigError(fault, f"--train.micro_batch {share}")
    return BatchPlan(train.global_batch, micro, -(-share // micro))
