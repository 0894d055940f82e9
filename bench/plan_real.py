"""Real rank processes for bench.plan: a step measured by the planner's tracker."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from bench.plan_cases import Case
from fsdp.config import load
from fsdp.data.types import Batch
from fsdp.distributed.mesh import BatchPlan, build_mesh, plan_batch, resolve
from fsdp.models.chunked_loss import ChunkedHead
from fsdp.models.loss import LossFunction
from fsdp.optim.optimizer import build_optimizer, maybe_ema, update_of
from fsdp.plan.estimate import memory_of
from fsdp.plan.fake_step import FakeRun, Subject, TracedSetup, part_of, subject_of, trace_step
from fsdp.plan.trace import KINDS, Tracker
from fsdp.run.job import model_of
from fsdp.run.step import StepParts, Totals, gradients_of, train_step
from fsdp.shard.context import apply_context
from fsdp.shard.ddp import replicate
from fsdp.shard.materialize import materialize
from fsdp.shard.shard import shard_model, sharding_of

LOOKS = 4
"""Steps that are looked at. A thread of gloo's holds a finished collective's tensors until it runs again: in
about one step of a hundred, on a busy machine, that is after the next unit has made its own, and no two steps
have it at the same place.
"""


class Ranks:
    """A pool of processes; each case is a process group of some of them."""

    def __enter__(self) -> Ranks:
        os.environ["OMP_NUM_THREADS"] = "1"
        self._pool = ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn"))
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def predict(self, case: Case) -> float:
        """Tensor bytes of the rank with most."""
        return self._pool.submit(_predict, case.flags, case.ranks).result()

    def measure(self, case: Case) -> float:
        with tempfile.TemporaryDirectory(prefix="plan-") as folder:
            store = str(Path(folder, "store"))
            ranks = range(case.ranks)
            jobs = [self._pool.submit(_measure, case.flags, case.ranks, rank, store) for rank in ranks]
            return max(job.result() for job in jobs)


# ---------------------------------------------------------------- predicted


def _asks(flags: tuple[str, ...], ranks: int) -> list[FakeRun]:
    config = load(list(flags))
    sizes = resolve(config.mesh, ranks)
    batch = plan_batch(config.train, sizes.data)
    return [
        FakeRun(config, sizes, rank, batch.micro_batch, min(batch.accumulation, 3), "cpu")
        for rank in range(ranks)
    ]


def _predict(flags: tuple[str, ...], ranks: int) -> float:
    return max(memory_of(trace_step(ask), ask).peak for ask in _asks(flags, ranks))


# ---------------------------------------------------------------- measured


def _measure(flags: tuple[str, ...], ranks: int, rank: int, store: str) -> float:
    dist.init_process_group("cpu:gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    try:
        return _real_steps(flags, ranks, rank)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Built:
    """A real run up to its first step."""

    watched: TracedSetup
    subject: Subject
    batch: BatchPlan

    def batches(self, device: str) -> Iterator[Batch]:
        return _real_batches(self.subject, self.batch.micro_batch, device)

    @property
    def micro_batches(self) -> int:
        """Three stand for any number: further ones are like the second."""
        return min(self.batch.accumulation, 3)


def build(flags: tuple[str, ...], ranks: int, rank: int, device: torch.device) -> Built:
    """As in fsdp/run/loop.py; the process group exists."""
    config = load(list(flags))
    sizes, subject = resolve(config.mesh, ranks), subject_of(config.model, config.data)
    mesh = build_mesh(sizes, device)
    dist.barrier()
    model = model_of(config, subject.spec)
    chunk = config.memory.loss_chunk
    loss_function = LossFunction(model, head=ChunkedHead(model, chunk) if chunk else None)
    job = sharding_of(config, sizes, device)
    if sizes.context > 1:
        apply_context(model, subject.spec.name, sizes, job.dtypes.param)
        subject = part_of(subject, sizes, rank, loss_function)
    sharded = shard_model(model, job, mesh)
    materialize(
        sharded,
        spec=subject.spec,
        seed=0,
        init="shard",
        rank=rank,
        rest_device=torch.device("cpu") if config.memory.cpu_offload else None,
    )
    replicate(sharded)
    optimizer = build_optimizer(config.optim, sharded.root)
    maybe_ema(config.optim, sharded.root, optimizer)
    parts = StepParts(
        sharded=sharded,
        loss_function=loss_function,
        gradients=gradients_of(sharded),
        optimizer=optimizer,
        update=update_of(optimizer, None),
        scaler=None,
        clip_norm=config.train.clip_grad_norm,
    )
    return Built(TracedSetup(parts, Tracker()), subject, plan_batch(config.train, sizes.data))


def _real_steps(flags: tuple[str, ...], ranks: int, rank: int) -> float:
    """Peak bytes of tensors."""
    built = build(flags, ranks, rank, torch.device("cpu"))
    built.watched.hold_state()
    built.watched.step(built.batches("cpu"), built.micro_batches)
    built.watched.hold_state()
    looks = list[np.ndarray]()
    for _ in range(LOOKS):
        built.watched.tracker.restart()
        built.watched.step(built.batches("cpu"), built.micro_batches)
        trace = built.watched.trace()
        starts = np.flatnonzero(np.diff(trace.part_of, prepend=-1))
        looks.append(np.maximum.reduceat(trace.curve[:, : len(KINDS)].sum(1), starts))
    # Of each part the least: what gloo let go of late is only ever added.
    return float(np.min(looks, axis=0).max())


def plain_step(parts: StepParts, batches: Iterator[Batch], count: int) -> None:
    """The loop's step, not traced."""
    lr = parts.optimizer.param_groups[0]["lr"]
    train_step(parts, batches, count, step=1, lr=lr, totals=Totals())


def _real_batches(subject: Subject, rows: int, device: str) -> Iterator[Batch]:
    while True:
        data = {
            name: (torch.zeros if dtype == torch.int64 else torch.rand)(
                (rows, *shape), dtype=dtype, device=device
            )
            for name, (shape, dtype) in subject.sample.items()
        }
        yield Batch(data, torch.ones(rows, dtype=torch.bool, device=device), rows)
