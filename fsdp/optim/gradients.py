"""The gradient norm of the whole, unsharded model on any mesh, and clipping by it.

Each rank norms the shards it holds, one sum goes over dp_shard alone (replicas hold the same gradient), and
gradients that are not sharded are added once. A NaN or an infinity on any rank shows in the norm of every
rank. torch's own clip_grad_norm_ takes one mesh at a time, never DTensors beside plain tensors, and pays a
DTensor dispatch for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp.base.torch_private.core import foreach_multiply_, foreach_norm
from fsdp.dist.shards import local_tensor

InTurn = Callable[[list[Tensor]], Iterable[list[Tensor]]]


class Gradients:
    """The trained parameters of one sharded model, collected once."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        shard_group: dist.ProcessGroup | None,
        in_turn: InTurn | None = None,
    ) -> None:
        """`in_turn` yields tensors a few at a time, for gradients that must not all be in memory at once."""
        listed = list(parameters)
        trained = [p for p in listed if p.requires_grad]
        self._frozen = [p for p in listed if not p.requires_grad]
        self._sharded: list[nn.Parameter] = [p for p in trained if isinstance(p, DTensor)]
        self._plain = [p for p in trained if not isinstance(p, DTensor)]
        self._group, self._in_turn = shard_group, in_turn or (lambda all_of_them: [all_of_them])
        self._norms: list[Tensor] = []

    def changed(self) -> nn.Parameter | None:
        """A parameter whose requires_grad is no longer what it was when they were collected."""
        for some, trained in ((self._frozen, False), (self._sharded, True), (self._plain, True)):
            for parameter in some:
                if parameter.requires_grad is not trained:
                    return parameter
        return None

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The global 2-norm, the same on every rank. Collective."""
        self._norms = []
        sharded, plain = self._locals(self._sharded), self._locals(self._plain)
        square = self._square_sum(sharded)
        # Without a trained shard on any rank, as of a lone temperature, there is nothing to sum.
        if self._sharded and self._group is not None and self._group.size() > 1:
            if square is None:
                first = self._sharded[0]
                square = torch.zeros((), dtype=_summed(first.dtype), device=first.device)
            dist.all_reduce(square, group=self._group)
        whole = [part for part in (square, self._square_sum(plain)) if part is not None]
        return torch.stack(whole).sum().sqrt() if whole else torch.zeros(())

    @torch.no_grad()
    def scale(self, factor: Tensor | float) -> None:
        for some in self._in_turn(self._locals(self._sharded) + self._locals(self._plain)):
            if some:  # gradients may be offloaded to the host, where no factor of a device is taken
                here = factor.to(some[0].device) if isinstance(factor, Tensor) else factor
                foreach_multiply_(some, here)

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Always multiplies: a branch would wait for the device."""
        self.scale((max_norm / (norm + 1e-6)).clamp(max=1.0))

    def parts(self) -> tuple[list[nn.Parameter], Tensor]:
        """The parameters of the last `norm`, and the norm of this rank's part of each."""
        holders = [p for p in (*self._sharded, *self._plain) if p.grad is not None]
        return holders, torch.cat(self._norms) if self._norms else torch.zeros(0)

    def first_nonfinite(self, named: Iterable[tuple[str, nn.Parameter]]) -> str | None:
        """The first parameter whose gradient on this rank is not finite, for the error message."""
        for name, parameter in named:
            if parameter.grad is not None:
                grad = parameter.grad
                if not bool(local_tensor(grad).isfinite().all()):
                    return name
        return None

    @staticmethod
    def _locals(parameters: list[nn.Parameter]) -> list[Tensor]:
        return [local_tensor(p.grad) for p in parameters if p.grad is not None]

    def _square_sum(self, grads: list[Tensor]) -> Tensor | None:
        if not grads:
            return None
        norms = torch.stack([norm for some in self._in_turn(grads) for norm in foreach_norm(some)])
        self._norms.append(norms)
        return torch.linalg.vector_norm(norms).square()


def _summed(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a norm of gradients in `dtype`."""
    return torch.float32 if dtype == torch.bfloat16 else dtype
