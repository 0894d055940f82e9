"""Broken reductions: each is a context manager that patches the process of a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import fsdp.models.attention
import fsdp.models.loss
import fsdp.run.build
import fsdp.run.step
import fsdp.shard.context
from fsdp.distributed.boxes import local_tensor
from fsdp.distributed.env import DistEnv
from fsdp.models.loss import LossFunction, LossParts
from fsdp.optim.gradients import Gradients
from fsdp.parity.__main__ import ParityOptions, Row, train_row
from fsdp.run.training_loop import TrainingLoop
from fsdp.shard.shard import Sharded
from fsdp.shard.tensor import TensorGradients

Break = Callable[[DistEnv], contextlib.AbstractContextManager[Any]]


def instead(owner: Any, name: str, make: Callable[[Any], Any]) -> contextlib.AbstractContextManager[Any]:
    """Replaces `owner.name` by `make(owner.name)`."""
    found = owner.__dict__[name]
    return mock.patch.object(owner, name, make(found.fget if isinstance(found, property) else found))


def times(factor: float) -> Break:
    """Multiplies every gradient before its norm is computed."""

    def make(norm: Any) -> Any:
        def broken(self: Gradients) -> Tensor:
            self.scale(factor)
            return norm(self)

        return broken

    return lambda env: instead(Gradients, "norm", make)


def with_gradient(parts: LossParts, factor: float) -> LossParts:
    """The same loss with its gradient multiplied."""
    return replace(parts, loss_sum=parts.loss_sum.detach() * (1 - factor) + parts.loss_sum * factor)


def rank_left_out(env: DistEnv) -> contextlib.AbstractContextManager[Any]:
    def make(call: Any) -> Any:
        return lambda self, *args: with_gradient(call(self, *args), 0.0 if env.rank == 1 else 1.0)

    return instead(LossFunction, "__call__", make)


def mean_over_tokens(env: DistEnv) -> contextlib.AbstractContextManager[Any]:
    """The mean over the tokens of each micro-batch, weighted by its rows."""

    def make(parts_of: Any) -> Any:
        def broken(logits: Tensor, targets: Tensor, valid: Tensor, *more: Any) -> LossParts:
            parts = parts_of(logits, targets, valid, *more)
            counted = (targets[valid] != -100).sum().clamp(min=1)
            return replace(parts, loss_sum=parts.loss_sum / counted * valid.sum() * targets.shape[-1])

        return broken

    return instead(fsdp.models.loss, "cross_entropy_parts", make)


def own_part(output: Tensor, given: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
    """A reduce-scatter without the reduction."""
    output.copy_(given.view(group.size(), -1)[group.rank()])


class Scatter:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        own_part(output_tensor, input_tensor, group, op)


def one_unit_by(
    scatter: Callable[[], Scatter], of: Callable[[Sharded], Any] = lambda sharded: sharded.units[1][0]
) -> Break:
    """One unit's gradients are reduced in another way."""

    def make(shard_model: Any) -> Any:
        def broken(*args: Any, **kwargs: Any) -> Sharded:
            sharded: Sharded = shard_model(*args, **kwargs)
            unit = of(sharded)
            if isinstance(unit, FSDPModule):
                unit.set_custom_reduce_scatter(scatter())  # type: ignore[arg-type]
            return sharded

        return broken

    return lambda env: instead(fsdp.run.build, "shard_model", make)


def sum_for_mean(env: DistEnv) -> contextlib.AbstractContextManager[Any]:
    """FSDP's reductions average gradients that are to be summed, and sum those that are to be averaged."""

    def make(shard_model: Any) -> Any:
        def broken(*args: Any, **kwargs: Any) -> Sharded:
            sharded: Sharded = shard_model(*args, **kwargs)
            for module in sharded.root.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0 if sharded.averaged_over > 1 else env.world_size)
            return sharded

        return broken

    return instead(fsdp.run.build, "shard_model", make)


def replicas_not_averaged(env: DistEnv) -> contextlib.AbstractContextManager[Any]:
    """The all-reduce over the replicas of HSDP is left out."""
    replicas: list[Any] = []

    def marked(shard_model: Any) -> Any:
        def broken(*args: Any, **kwargs: Any) -> Sharded:
            sharded: Sharded = shard_model(*args, **kwargs)
            hsdp = sharded.sizes.strategy == "hsdp"
            replicas[:] = [sharded.mesh.get_group("dp_replicate")] if hsdp else []
            return sharded

        return broken

    def make(all_reduce: Any) -> Any:
        def broken(
            tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
        ) -> Any:
            return None if group in replicas else all_reduce(tensor, op, group, async_op)

        return broken

    stack = contextlib.ExitStack()
    stack.enter_context(instead(fsdp.run.build, "shard_model", marked))
    stack.enter_context(instead(dist, "all_reduce", make))
    return stack


def first_micro_batch_dropped(env: DistEnv) -> contextlib.AbstractContextManager[Any]:
    left: list[int] = []

    def counted(train_step: Any) -> Any:
        def broken(self: TrainingLoop, batch: Any, lr: float) -> Any:
            left[:] = [0 if at == 0 and len(batch.micro) > 1 else 1 for at in range(len(batch.micro))]
            return train_step(self, batch, lr)

        return broken

    def dropped(call: Any) -> Any:
        return lambda self, *args: with_gradient(call(self, *args), float(left.pop(0)) if left else 1.0)

    stack = contextlib.ExitStack()
    stack.enter_context(instead(TrainingLoop, "train_step", counted))
    stack.enter_context(instead(LossFunction, "__call__", dropped))
    return stack


def clipped_by_local_norm(env: DistEnv) -> contextlib.AbstractContextManager[Any]:
    def make(clip: Any) -> Any:
        def broken(self: Gradients, max_norm: float, norm: Tensor, kernel: Any) -> None:
            group, self._group = self._group, None
            own = self.norm()
            self._group = group
            clip(self, max_norm, own)

        return broken

    return instead(Gradients, "clip", make)


def gradients_kept(env: DistEnv) -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(torch.optim.Optimizer, "zero_grad")


# ---------------------------------------------------------------- context, tensor and expert ranks


def averaged_for_summed(env: DistEnv) -> contextlib.AbstractContextManager[Any]:
    """Gradients of which each tensor rank has a part, as those of q's norm; without the check of a run."""

    def make(reduce: Any) -> Any:
        def broken(self: TensorGradients) -> None:
            self._summed, self.checked = frozenset(), True
            reduce(self)

        return broken

    return instead(TensorGradients, "reduce", make)


def norms_drift(env: DistEnv) -> contextlib.AbstractContextManager[Any]:
    """After each update, on one rank."""

    def make(train_step: Any) -> Any:
        def broken(self: TrainingLoop, batch: Any, lr: float) -> Any:
            done = train_step(self, batch, lr)
            for name, parameter in self.sharded.root.named_parameters():
                if env.rank == 1 and "norm" in name:
                    with torch.no_grad():
                        local_tensor(parameter).mul_(1 + 1e-7)
            return done

        return broken

    return instead(TrainingLoop, "train_step", make)


def window_ignored(env: DistEnv) -> contextlib.AbstractContextManager[Any]:
    def make(mask: Any) -> Any:
        return lambda starts, dtype, window: mask(starts, dtype, starts.shape[1])

    return instead(fsdp.models.attention, "document_mask", make)


def exchanged_in_another_order(env: DistEnv) -> contextlib.AbstractContextManager[Any]:
    """What ranks send is joined from the last to the first; without the check of a run."""

    def make(exchanged: Any) -> Any:
        def broken(parts: list[Tensor], given: int, received: int, group: Any) -> list[Tensor]:
            joined = exchanged(parts, given, received, group)
            return [torch.cat(one.chunk(group.size(), received)[::-1], received) for one in joined]

        return broken

    stack = contextlib.ExitStack()
    stack.enter_context(instead(fsdp.shard.context, "_exchanged", make))
    stack.enter_context(mock.patch.object(TrainingLoop, "_check_packed_rows"))
    return stack


def nothing(env: DistEnv) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


BREAKS: dict[str, Break] = {
    "nothing": nothing,
    "twice": times(2.0),
    "a rank left out": rank_left_out,
    "mean over tokens": mean_over_tokens,
    "a unit not reduced": one_unit_by(Scatter),
    "sum and mean exchanged": sum_for_mean,
    "replicas not averaged": replicas_not_averaged,
    "first micro-batch dropped": first_micro_batch_dropped,
    "clipped by local norm": clipped_by_local_norm,
    "gradients kept": gradients_kept,
    "an average for a sum": averaged_for_summed,
    "norms drift": norms_drift,
    "window ignored": window_ignored,
    "another order": exchanged_in_another_order,
    "experts not reduced": one_unit_by(
        Scatter, lambda sharded: sharded.experts and sharded.experts.modules[0]
    ),
}


def train_broken(env: DistEnv, name: str, asked: ParityOptions, tried: list[Row], folder: str) -> None:
    """The work of one rank of the command, with one of BREAKS."""
    with BREAKS[name](env):
        for number, row in enumerate(tried):
            train_row(env, asked, row, f"{folder}/{number}")
    assert dist.is_initialized()
