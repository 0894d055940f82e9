"""Evaluation on held-out data with the same sharded model: each sample once, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import config as configuration
from fsdp.base.phases import Activity, announces
from fsdp.config import Config, DataSection, TrainSection
from fsdp.data import DataSet, heldout_batches
from fsdp.data.types import Batch, Samples
from fsdp.dist.collectives import ranks, sum_over_ranks
from fsdp.dist.mesh import BatchPlan, DataRank
from fsdp.models.init import persistent
from fsdp.models.loss import LossFunction
from fsdp.optim.state import Ema
from fsdp.parallel.shard import Sharded
from fsdp.run.step import sums_by_source


@dataclass(frozen=True)
class Evaluation:
    """loss is the mean; accuracy is None for a model that returns its own loss only."""

    loss: float
    accuracy: float | None
    stopped: str | None
    averaged: Evaluation | None = None
    """That of the weights' moving average."""
    by_source: Mapping[str, float] = field(default_factory=dict)
    """Each source's mean loss, of a mixture."""

    def values(self) -> dict[str, float]:
        found = {"eval_loss": self.loss} | ({} if self.accuracy is None else {"eval_accuracy": self.accuracy})
        found |= {f"eval_loss/{label}": loss for label, loss in self.by_source.items()}
        more = {} if self.averaged is None else self.averaged.values()
        return found | {name.replace("eval_", "eval_ema_", 1): value for name, value in more.items()}


@dataclass(frozen=True)
class Outcome:
    """How a start ended. `stopped` is why it ended before its last step; None if it reached it."""

    run_dir: Path
    step: int
    stopped: str | None
    evaluation: Evaluation | None


def as_evaluated(config: Config) -> Config:
    """The configuration of an evaluation alone: the run that it may come from keeps its checkpoints."""
    return configuration.replace(
        config, checkpoint__dir="", checkpoint__local_dir="", checkpoint__export=False
    )


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """The evaluations of a run: with its weights and, where it keeps one, with their moving average."""

    sections: tuple[TrainSection, DataSection]
    sharded: Sharded
    loss_function: LossFunction
    data: DataSet
    batch: BatchPlan
    rank: DataRank
    ema: Ema | None
    before_swap: Callable[[], None]
    """Waits for a save that may still read the parameters."""
    after_swap: Callable[[], None]
    """Computes anew what depends on the parameters' values."""
    asked_to_stop: Callable[[], str | None]

    def evaluate(self) -> Evaluation:
        """Collective. A request to stop ends it; `stopped` is set then."""
        found = self._measure()
        if self.ema is None or found.stopped:
            return found
        self.before_swap()
        with self._averaged(self.ema):
            averaged = self._measure()
        return replace(found, averaged=averaged, stopped=averaged.stopped)

    @contextmanager
    def _averaged(self, ema: Ema) -> Iterator[None]:
        with ema.swapped():
            self.after_swap()
            yield
        self.after_swap()

    def _measure(self) -> Evaluation:
        """A request to stop, agreed by all ranks, ends it early."""
        assert self.data.heldout is not None
        sums = _Sums(self.data, self.loss_function, self.sharded.device)
        stopped: str | None = None
        with buffers_of_rank_0(self.sharded.root), self.sharded.evaluating():
            batches = self._batches(self.data.heldout)
            while (batch := _next(batches)) is not None:
                sums.add(self.sharded.called, batch)
                stopped = self.asked_to_stop()
                if stopped:
                    break
        return sums.over_ranks(stopped)

    def _batches(self, heldout: Samples) -> Iterator[Batch]:
        (train, reading), device = self.sections, self.sharded.device
        return heldout_batches(
            heldout,
            batch=train.eval_batch or self.batch.micro_batch,
            rank=self.rank,
            limit=train.eval_samples,
            workers=reading.workers,
            prefetch=reading.prefetch,
            pin=device.type == "cuda",
            device=device,
            source_of=None if self.data.sources is None else self.data.sources.of_heldout,
        )


@contextmanager
def buffers_of_rank_0(model: nn.Module) -> Iterator[None]:
    """Collective. Each rank's samples change BatchNorm's statistics on it; checkpoints and exports have rank
    0's, and so has an evaluation. Afterwards each rank has its own again: an evaluation changes no training.
    """
    kept = set(persistent(model))
    buffers = [one for name, one in model.named_buffers() if name in kept and one.numel()]
    if ranks() == 1 or not buffers:
        yield
        return
    own = [one.clone() for one in buffers]
    with torch.no_grad():
        joined = torch.cat([one.reshape(-1).view(torch.uint8) for one in own])
        dist.broadcast(joined, 0)
        for buffer, part in zip(buffers, joined.split([one.nbytes for one in own]), strict=True):
            # a copy: a part may begin where its dtype may not
            buffer.copy_(part.clone().view(buffer.dtype).view_as(buffer))
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, own, strict=True):
                buffer.copy_(value)


@announces(Activity.DATA)
def _next(batches: Iterator[Batch]) -> Batch | None:
    return next(batches, None)


class _Sums:
    """Sums over the batches of this rank: losses, weights, right answers."""

    def __init__(self, data: DataSet, loss_function: LossFunction, device: torch.device) -> None:
        self._loss_function, self._device = loss_function, device
        self._labels = () if data.sources is None else data.sources.labels
        self._loss, self._weighed = self._zeros(()), self._zeros(())
        self._correct = torch.zeros((), dtype=torch.int64, device=device)
        self._counted = 0.0
        self._by_source = self._zeros(2 * len(self._labels))

    def _zeros(self, shape: int | tuple[()]) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self._device)

    def add(self, model: nn.Module, host: Batch) -> None:
        one = host.to(self._device)
        parts = self._loss_function(model, one.data, one.valid, one.valid_rows)
        self._loss += parts.loss_sum.double()
        if own := sums_by_source(parts, one, len(self._labels)):
            self._by_source += torch.cat(own)
        if parts.correct is not None:
            self._correct += parts.correct
        if parts.weight is not None:
            self._weighed += parts.weight
        elif self._loss_function.counts_tokens:
            self._counted += self._loss_function.tokens(host.counted)
        else:
            self._counted += host.valid_rows

    def over_ranks(self, stopped: str | None) -> Evaluation:
        """Collective."""
        total, right, count, *own = sum_over_ranks(
            float(self._loss),
            float(self._correct),
            self._counted + float(self._weighed),
            *self._by_source.tolist(),
        )
        losses, weights = own[: len(self._labels)], own[len(self._labels) :]
        means = {label: loss / n for label, loss, n in zip(self._labels, losses, weights, strict=True) if n}
        accuracy = right / max(count, 1) if self._loss_function.classifies else None
        return Evaluation(total / (count or 1), accuracy, stopped, by_source=means)
