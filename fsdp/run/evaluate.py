"""Evaluation on held-out data with the same sharded model: each sample once, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.base.phases import Activity, announces
from fsdp.data import heldout_batches
from fsdp.data.types import Batch
from fsdp.distributed.collectives import ranks, sum_over_ranks
from fsdp.models.init import persistent
from fsdp.run.build import RunParts, maybe_cut
from fsdp.run.step import sums_by_source


@dataclass(frozen=True)
class Evaluation:
    """loss is the mean; accuracy is None for a model that returns its own loss only. `of_tokens`: it is the
    cross entropy of tokens, whose exponential is the perplexity.
    """

    loss: float
    accuracy: float | None
    stopped: str | None
    of_tokens: bool = False
    averaged: Evaluation | None = None
    """That of the weights' moving average."""
    by_source: Mapping[str, float] = field(default_factory=dict)
    """Each source's mean loss, of a mixture; of a model that returns several losses each of them."""

    def values(self) -> dict[str, float]:
        named = {"eval_loss": self.loss} | ({} if self.accuracy is None else {"eval_accuracy": self.accuracy})
        if self.of_tokens:  # infinite, not an OverflowError
            named["eval_perplexity"] = torch.tensor(self.loss, dtype=torch.float64).exp().item()
        named |= {f"eval_loss/{label}": loss for label, loss in self.by_source.items()}
        more = {} if self.averaged is None else self.averaged.values()
        return named | {name.replace("eval_", "eval_ema_", 1): value for name, value in more.items()}


@dataclass(frozen=True)
class Outcome:
    """How a start ended. `stopped` is why it ended before its last step; None if it reached it."""

    run_dir: Path
    step: int
    stopped: str | None
    evaluation: Evaluation | None


def evaluate(
    parts: RunParts, after_swap: Callable[[], None] | None, asked_to_stop: Callable[[], str | None]
) -> Evaluation:
    """With the run's weights and, where it keeps one, with their moving average. Collective. A request to
    stop, agreed by all ranks, ends it early; `stopped` is set then. `after_swap` computes anew what depends
    on the parameters' values.
    """
    evaluation, refresh = _measured(parts, asked_to_stop), after_swap or (lambda: None)
    if parts.ema is None or evaluation.stopped:
        return evaluation
    parts.checkpointer.before_update()  # a save may still read the parameters
    with parts.ema.swapped():
        refresh()
        averaged = _measured(parts, asked_to_stop)
    refresh()
    return replace(evaluation, averaged=averaged, stopped=averaged.stopped)


def _measured(parts: RunParts, asked_to_stop: Callable[[], str | None]) -> Evaluation:
    data, function, sharded, train = parts.job.data, parts.loss_function, parts.sharded, parts.config.train
    device, labels = sharded.device, () if data.sources is None else data.sources.labels
    assert data.heldout is not None
    batches = heldout_batches(
        data.heldout,
        batch=train.eval_batch or parts.job.batch.micro_batch,
        rank=parts.job.place.data,
        limit=train.eval_samples,
        workers=parts.config.data.workers,
        prefetch=parts.config.data.prefetch,
        pin=device.type == "cuda",
        device=device,
        source_of=None if data.sources is None else data.sources.of_heldout,
        cut=maybe_cut(parts),
    )
    # losses, right answers, weights on the device, each source's loss and weight, then the model's own losses
    sums, counted, stopped = torch.zeros(3 + 2 * len(labels), dtype=torch.float64, device=device), 0, None
    own_losses: dict[str, Tensor] = {}
    with buffers_of_rank_0(sharded.root), sharded.evaluating():
        while stopped is None and (host := _next(batches)) is not None:
            batch = host.to(device)
            loss = function(sharded.called, batch.data, batch.valid, batch.valid_rows)
            sums[0] += loss.loss_sum
            if loss.correct is not None:
                sums[1] += loss.correct
            if loss.weight is not None:
                sums[2] += loss.weight
            else:
                counted += function.tokens(host.counted) if function.counts_tokens else host.valid_rows
            for name, part in loss.parts.items():
                own_losses[name] = own_losses.get(name, 0) + part.double().view(1)
            if rows := sums_by_source(loss, batch, len(labels)):
                sums[3:] += torch.cat(rows)
            stopped = asked_to_stop()
    sums = torch.cat([sums, *own_losses.values()])
    if parts.job.place.tensor:  # another rank has the same numbers; a NaN stays one
        sums, counted = 0 * sums, 0
    total, right, weight, *by_source = sum_over_ranks(*sums.tolist(), counted)
    count = weight + by_source.pop()
    losses = zip(labels, by_source, by_source[len(labels) :], strict=False)
    means = {label: loss / weight for label, loss, weight in losses if weight}
    own = zip(own_losses, by_source[2 * len(labels) :], strict=True)
    means |= {name: loss / (count or 1) for name, loss in own}
    accuracy = right / max(count, 1) if function.classifies else None
    of_tokens = function.is_token_entropy and data.info.kind == "text"
    return Evaluation(total / (count or 1), accuracy, stopped, of_tokens, by_source=means)


@contextmanager
def buffers_of_rank_0(model: nn.Module) -> Iterator[None]:
    """Collective. Each rank's samples change BatchNorm's statistics on it; checkpoints and exports have rank
    0's, and so has an evaluation. Afterwards each rank has its own again: an evaluation changes no training.
    """
    names = set(persistent(model))
    buffers = [buffer for name, buffer in model.named_buffers() if name in names and buffer.numel()]
    if ranks() == 1 or not buffers:
        yield
        return
    own = [buffer.clone() for buffer in buffers]
    with torch.no_grad():
        for buffer, value in zip(buffers, own, strict=True):
            sent = value.reshape(-1).view(torch.uint8).clone()  # not every backend sends every dtype
            dist.broadcast(sent, 0)
            buffer.copy_(sent.view(buffer.dtype).view_as(buffer))
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, own, strict=True):
                buffer.copy_(value)


@announces(Activity.DATA)
def _next(batches: Iterator[Batch]) -> Batch | None:
    return next(batches, None)
