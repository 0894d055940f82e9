"""The optimizer: momentum on shards, Newton–Schulz on whole matrices, AdamW for the other parameters."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp.dist import collectives
from fsdp.dist.shards import local_tensor
from fsdp.optim.muon.exchange import apply_to_whole, matrix_of, rounds

log = logging.getLogger(__name__)

AdjustLr = Literal["match_rms_adamw", "original"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration (kellerjordan.github.io/posts/muon), as in torch.optim.Muon."""
EPS = 1e-7
DTYPE = torch.bfloat16
"""Of the iteration, as in torch.optim.Muon. Rows are sent in it: the owner would cast them anyway."""
MOMENTUM = "momentum_buffer"


class ShardedMuon(torch.optim.Optimizer):
    """`matrices` is the group that Muon updates, `others` the optimizer of all other parameters, if there are
    any; its groups and states are part of this one's.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        others: torch.optim.Optimizer | None,
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        ns_steps: int = 5,
        adjust_lr: AdjustLr = "match_rms_adamw",
    ) -> None:
        group: dict[str, Any] = {
            "params": list(matrices), "lr": lr, "weight_decay": weight_decay, "momentum": momentum,
            "ns_steps": ns_steps, "adjust_lr": adjust_lr,
        }  # fmt: skip
        super().__init__([group, *(others.param_groups if others is not None else ())], {})
        self._others = others
        if others is not None:
            others.state = self.state
        self._shapes = [matrix_of(parameter) for parameter in matrices]
        self._rounds = rounds(self._shapes, collectives.ranks())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        for parameter in group["params"]:
            self._advance_momentum(group, parameter)
        for owned in self._rounds:
            self._update(group, owned)
        if self._others is not None:
            self._others.step()

    def drop_other_states(self) -> None:
        """After a restore: states of parameters that changed between Muon and AdamW start anew."""
        moved = [
            parameter
            for at, group in enumerate(self.param_groups)
            for parameter in group["params"]
            if self.state.get(parameter) and (MOMENTUM in self.state[parameter]) != (at == 0)
        ]
        for parameter in moved:
            del self.state[parameter]
        if moved:
            log.info("%d parameters start with fresh states: --optim.muon_parameters changed", len(moved))

    def _update(self, group: dict[str, Any], owned: list[list[int]]) -> None:
        parameters = group["params"]
        found = apply_to_whole(
            self._shapes,
            owned,
            lambda at: self._direction(group, parameters[at]),
            functools.partial(orthogonalized, steps=group["ns_steps"]),
            dtype=DTYPE,
            device=_compute_device(parameters[0]),
        )
        for at, update in found:
            parameter = parameters[at]
            if parameter.grad is not None:
                local, ratio = local_tensor(parameter), lr_ratio(parameter.shape, group["adjust_lr"])
                local.mul_(1 - group["lr"] * group["weight_decay"])
                local.add_(update.to(local.device), alpha=-group["lr"] * ratio)

    def _advance_momentum(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        """On every replica, also on those that do not send this matrix: any of them may write it into a
        checkpoint.
        """
        if parameter.grad is None:
            return
        state = self.state[parameter]
        if not state:
            state[MOMENTUM] = torch.zeros_like(parameter, requires_grad=False)
        local_tensor(state[MOMENTUM]).lerp_(local_tensor(parameter.grad), 1 - group["momentum"])

    def _direction(self, group: dict[str, Any], parameter: nn.Parameter) -> Tensor:
        """This rank's rows of the gradient with Nesterov momentum. Zeros for a parameter without a gradient:
        the exchange is the same at every step.
        """
        if parameter.grad is None:
            return torch.zeros_like(local_tensor(parameter))
        momentum = local_tensor(self.state[parameter][MOMENTUM])
        return local_tensor(parameter.grad).lerp(momentum, group["momentum"])


def orthogonalized(matrix: Tensor, *, steps: int) -> Tensor:
    """About U Vᵀ of the matrix's singular value decomposition U S Vᵀ, by the Newton–Schulz iteration.
    Overwrites the matrix.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    found = matrix.T if tall else matrix
    found.div_(found.norm().clamp(min=EPS))
    for _ in range(steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if tall else found


def lr_ratio(shape: torch.Size, adjust_lr: AdjustLr) -> float:
    """match_rms_adamw gives updates of AdamW's size (arXiv 2502.16982); original is Keller Jordan's."""
    rows, columns = shape
    if adjust_lr == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _compute_device(parameter: Tensor) -> torch.device:
    """The device of the collectives: offloaded shards are on the host."""
    if isinstance(parameter, DTensor) and parameter.device.type != parameter.device_mesh.device_type:
        kind = parameter.device_mesh.device_type
        return torch.device(kind, torch.get_device_module(kind).current_device())
    return parameter.device
