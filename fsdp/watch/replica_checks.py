"""Checks for wrong numbers: compares replicas, and records the samples of a spike of the gradient norm.

    RUN/watch/spikes.jsonl       step, grad_norm, usual (the median before it), samples (of that batch)

`compare` is collective, at the same steps on every rank. SpikeRecorder receives rank 0's records.
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

from fsdp.base.digest import digest_shard
from fsdp.base.errors import ConfigError, TrainingError
from fsdp.base.text import named_ranks
from fsdp.config import WatchSection
from fsdp.dist import collectives
from fsdp.dist.env import set_variable
from fsdp.dist.shards import local_tensor
from fsdp.models.units import clean_name
from fsdp.parallel.shard import Sharded
from fsdp.rundir.history import Appender

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
    """One rank's side of the comparison of replicas."""

    def __init__(self, section: WatchSection, sharded: Sharded) -> None:
        self._every, self._root = section.divergence, sharded.root
        self._replicas = sharded.mesh.get_group("dp_replicate") if sharded.sizes.replicate > 1 else None
        if self._every and self._replicas is None:
            raise ConfigError(
                f"--watch.divergence {self._every}: there is one replica.",
                "--watch.divergence 0, or --mesh.strategy hsdp",
            )

    def compare(self, step: int) -> None:
        """Call it after an update: raises TrainingError on every rank unless replicas hold the same bits."""
        if not self._every or step % self._every:
            return
        assert self._replicas is not None
        named = list(self._root.named_parameters())
        digests: list[list[int]] = [[] for _ in range(self._replicas.size())]
        own = [digest_shard(local_tensor(parameter)).weighted for _, parameter in named]
        dist.all_gather_object(digests, own, group=self._replicas)
        by_parameter = list(zip(*digests, strict=True))
        differing = [index for index, values in enumerate(by_parameter) if len(set(values)) > 1]
        ranks = dist.get_process_group_ranks(self._replicas)
        odd = odd_ones(by_parameter[differing[0]], ranks) if differing else []
        # each rank compares its own shard: all raise if any differs
        name = named[differing[0]][0] if differing else ""
        reports = [found for found in collectives.all_gather_objects((name, odd, len(differing))) if found[0]]
        if reports:
            odd_ranks = sorted({rank for _, odd, _ in reports for rank in odd})
            raise TrainingError(
                f"step {step}: replicas differ in {reports[0][2]} of {len(named)} parameters, first "
                f"{clean_name(reports[0][0])}: the bits of {named_ranks(odd_ranks)} are not the others'.",
                "start again from the previous checkpoint; if it is the same node each time, leave it out",
                ranks=tuple(odd_ranks),
            )


def odd_ones(digests: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Ranks whose digest is not the majority's; all if there is no majority."""
    (common, count), *_ = Counter(digests).most_common(1)
    if count * 2 <= len(digests):
        return list(ranks)
    return [rank for rank, digest in zip(ranks, digests, strict=True) if digest != common]
