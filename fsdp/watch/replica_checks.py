"""Checks for wrong numbers: compares replicas, records gradient norms by unit and the samples of a spike.

    RUN/watch/spikes.jsonl       step, grad_norm, usual (the median before it), samples (of that batch)
    RUN/watch/gradients.jsonl    step, units: the gradient norm of each communication unit, before clipping

`gradients` and `compare` are collective, at the same steps on every rank. SpikeRecorder receives
rank 0's records.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp.base.digest import digest_shard
from fsdp.base.errors import ConfigError, TrainingError
from fsdp.base.text import named_ranks
from fsdp.config import WatchSection
from fsdp.dist import collectives
from fsdp.dist.env import DistEnv, set_variable
from fsdp.dist.local_tensors import local_tensor
from fsdp.models.units import clean_name
from fsdp.parallel.shard import Sharded
from fsdp.rundir.line_files import Appender

USUAL = 64
"""Steps whose median is the usual norm; the first FEWEST are never a spike."""
FEWEST = 16
MOST_SAMPLES = 4096


def make_deterministic() -> None:
    """Call it before anything is computed. An operation that cannot repeat raises with its name."""
    # cuBLAS repeats its results only with this workspace, and reads the variable when it starts
    set_variable("CUBLAS_WORKSPACE_CONFIG", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"))
    # NCCL's choice of algorithm, and with it the order of a sum, may follow its measurements
    set_variable("NCCL_ALGO", os.environ.get("NCCL_ALGO", "Ring"))
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


class SpikeRecorder:
    """A sink of fsdp/record/recorder.py: receives each step's numbers once they are on the host."""

    def __init__(self, factor: float, run: Path, indices: Callable[[int], np.ndarray]) -> None:
        self._factor, self._indices = factor, indices
        self._file = Appender(run / "watch" / "spikes.jsonl")
        self._before: deque[float] = deque(maxlen=USUAL)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        norm = values.get("train/grad_norm")
        if norm is None or not self._factor:
            return
        usual = median(self._before) if len(self._before) >= FEWEST else 0.0
        if usual > 0 and not norm <= self._factor * usual:  # so that NaN is one too
            samples = self._indices(step - 1)[:MOST_SAMPLES].tolist()
            self._file.append({"step": step, "grad_norm": norm, "usual": usual, "samples": samples})
        if norm < float("inf"):
            self._before.append(norm)

    def close(self) -> None:
        self._file.close()


class ReplicaChecks:
    """One rank's side of the comparisons and sums over ranks."""

    def __init__(self, section: WatchSection, env: DistEnv, run: Path, sharded: Sharded) -> None:
        self._section, self._env = section, env
        self._file = Appender(run / "watch" / "gradients.jsonl")
        self._root = sharded.root
        names = {id(module): name for name, module in sharded.root.named_modules()}
        self._units = _parameters_by_unit(sharded, names)
        sharding = sharded.sizes.strategy != "ddp"
        self._shards = sharded.mesh.get_group("dp_shard") if sharding else None
        self._replicas = sharded.mesh.get_group("dp_replicate") if sharded.sizes.replicate > 1 else None
        if section.divergence and self._replicas is None:
            raise ConfigError(
                f"--watch.divergence {section.divergence}: there is one replica.",
                "--watch.divergence 0, or --mesh.strategy hsdp",
            )

    @torch.no_grad()
    def gradients(self, step: int) -> None:
        """Call it after backward and before clipping: records each unit's norm."""
        every = self._section.unit_norms
        if not every or step % every:
            return
        first = self._shards is None or self._shards.rank() == 0
        squares = torch.stack([_square(parameters, first) for parameters in self._units.values()])
        if self._shards is not None and self._shards.size() > 1:
            dist.all_reduce(squares, group=self._shards)
        if self._env.is_main:
            norms = dict(zip(self._units, squares.sqrt().tolist(), strict=True))
            self._file.append({"step": step, "units": norms})

    def close(self) -> None:
        """Local."""
        self._file.close()

    def compare(self, step: int) -> None:
        """Call it after an update: raises TrainingError on every rank unless replicas hold the same bits."""
        every = self._section.divergence
        if not every or step % every:
            return
        assert self._replicas is not None
        named = list(self._root.named_parameters())
        own = [digest_shard(local_tensor(parameter)).weighted for _, parameter in named]
        digests: list[list[int]] = [[] for _ in range(self._replicas.size())]
        dist.all_gather_object(digests, own, group=self._replicas)
        differ = [i for i in range(len(named)) if len({one[i] for one in digests}) > 1]
        ranks = dist.get_process_group_ranks(self._replicas)
        odd = odd_ones([one[differ[0]] for one in digests], ranks) if differ else []
        # each rank compares its own shard: all raise if any differs
        everyone = collectives.all_gather_objects((named[differ[0]][0] if differ else "", odd, len(differ)))
        found = [one for one in everyone if one[0]]
        if found:
            odd_ranks = sorted({rank for one in found for rank in one[1]})
            raise _diverged(step, clean_name(found[0][0]), odd_ranks, len(named), found[0][2])


def _diverged(step: int, name: str, ranks: Sequence[int], parameters: int, differing: int) -> TrainingError:
    return TrainingError(
        f"step {step}: replicas differ in {differing} of {parameters} parameters, first {name}: the bits of "
        f"{named_ranks(ranks)} are not the others'.",
        "start again from the previous checkpoint; if it is the same node each time, leave it out",
        ranks=tuple(ranks),
    )


def odd_ones(digests: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Ranks whose digest is not the majority's; all if there is no majority."""
    (common, count), *_ = Counter(digests).most_common(1)
    if count * 2 <= len(digests):
        return list(ranks)
    return [rank for rank, digest in zip(ranks, digests, strict=True) if digest != common]


def _parameters_by_unit(sharded: Sharded, names: Mapping[int, str]) -> dict[str, list[nn.Parameter]]:
    """Parameters by unit; those of no unit are the root's."""
    taken: set[int] = set()
    units: dict[str, list[nn.Parameter]] = {}
    for modules in sharded.units:
        own = [p for module in modules for p in module.parameters() if p.requires_grad and id(p) not in taken]
        taken |= {id(p) for p in own}
        unit = "+".join(clean_name(names.get(id(module), "unit")) for module in modules)
        units[unit or "root"] = own
    rest = [p for p in sharded.root.parameters() if p.requires_grad and id(p) not in taken]
    return {**units, **({"root": [*units.get("root", []), *rest]} if rest else {})}


def _square(parameters: Sequence[nn.Parameter], first: bool) -> Tensor:
    """This rank's part of the sum of squares. An unsharded gradient counts on the first rank."""
    total: Tensor | None = None
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            counts = 1.0 if isinstance(grad, DTensor) or first else 0.0
            square = torch.linalg.vector_norm(local_tensor(grad)).double().square() * counts
            total = square if total is None else total + square
    if total is not None:
        return total
    device = parameters[0].device if parameters else torch.device("cpu")
    return torch.zeros((), dtype=torch.float64, device=device)
