"""Evaluation on held-out data with the same sharded model: each sample once, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from fsdp.config import Config, DataSection, TrainSection
from fsdp.data import DataSet, heldout_batches
from fsdp.dist.collectives import sum_over_ranks
from fsdp.dist.mesh import BatchPlan, DataRank
from fsdp.models.loss import LossFunction
from fsdp.optim.ema import Ema
from fsdp.parallel.shard import Sharded
from fsdp.run.source_losses import sums_by_source


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


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """The evaluations of a run: with its weights and, where it keeps one, with their moving average."""

    config: Config
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
        return evaluate(
            self.sharded,
            self.loss_function,
            self.data,
            section=self.config.train,
            reading=self.config.data,
            batch=self.batch,
            rank=self.rank,
            asked_to_stop=self.asked_to_stop,
        )


def evaluate(
    sharded: Sharded,
    loss_function: LossFunction,
    data: DataSet,
    *,
    section: TrainSection,
    reading: DataSection,
    batch: BatchPlan,
    rank: DataRank,
    asked_to_stop: Callable[[], str | None],
) -> Evaluation:
    """Collective. A request to stop, agreed by all ranks, ends it early and leaves no evaluation."""
    assert data.heldout is not None
    size = section.eval_batch or batch.micro_batch
    loss_sum = torch.zeros((), dtype=torch.float64, device=sharded.device)
    correct = torch.zeros((), dtype=torch.int64, device=sharded.device)
    weight, weighed = 0.0, torch.zeros((), dtype=torch.float64, device=sharded.device)
    stopped: str | None = None
    labels = () if data.sources is None else data.sources.labels
    by_source = torch.zeros(2 * len(labels), dtype=torch.float64, device=sharded.device)
    with sharded.evaluating():
        on_cuda = sharded.device.type == "cuda"
        for host in heldout_batches(
            data.heldout,
            batch=size,
            rank=rank,
            limit=section.eval_samples,
            workers=reading.workers,
            prefetch=reading.prefetch,
            pin=on_cuda,
            device=sharded.device if reading.to_device else None,
            source_of=None if data.sources is None else data.sources.of_heldout,
        ):
            one = host.to(sharded.device)
            parts = loss_function(sharded.called, one.data, one.valid, one.valid_rows)
            loss_sum += parts.loss_sum.double()
            if own := sums_by_source(parts, one, len(labels)):
                by_source += torch.cat(own)
            if parts.correct is not None:
                correct += parts.correct
            if parts.weight is not None:
                weighed += parts.weight
            else:
                tokens = loss_function.counts_tokens
                weight += loss_function.tokens(host.counted) if tokens else host.valid_rows
            stopped = asked_to_stop()
            if stopped:
                break
    total, right, count, *own_sums = sum_over_ranks(
        float(loss_sum), float(correct), weight + float(weighed), *by_source.tolist()
    )
    losses, weights = own_sums[: len(labels)], own_sums[len(labels) :]
    means = {label: loss / n for label, loss, n in zip(labels, losses, weights, strict=True) if n}
    accuracy = right / max(count, 1) if loss_function.classifies else None
    return Evaluation(total / (count or 1), accuracy, stopped, by_source=means)
