"""The optimizer: its update, the states of a parameter, their shards, and the conversion of a checkpoint's
moments.

Not here: how a number becomes bf16 or 8 bits (bits.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp.base.torch_private.core import like_shard
from fsdp.dist.shards import first_row, local_tensor
from fsdp.optim.small_states.bits import Table, blocks_of, decode, encode, mixed, noise_at, round_at_random
from fsdp.optim.small_states.compiled import Scalars, update_coded, update_plain
from fsdp.optim.small_states.compiled import compiled as compiled_update

Kind = Literal["bf16", "8bit"]

MOMENTS = ("exp_avg", "exp_avg_sq")
SHORTEST_ROW = 64
"""Elements of a row from which on 8 bits save more than their scales take."""
PARAMETERS = 0x27D4EB2F
"""Distinguishes the random bits of a parameter from those of its moments."""
SLICE = 1 << 20
"""Elements that are widened to fp32 at a time."""
COMPILED_SLICE = 1 << 26


class SmallStateAdam(torch.optim.Optimizer):
    """AdamW as in torch; a group's weight_decay of 0 makes it Adam."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        kind: Kind,
        places: Mapping[nn.Parameter, int],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        compiled: bool = False,
    ) -> None:
        """`places` numbers the parameters the same way at any number of ranks. `compiled`: as compiled.py."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.kind = kind
        self._places = places
        self._counts: dict[nn.Parameter, tuple[Tensor, int]] = {}
        self._tables = _Tables()
        self._scalars = Scalars() if compiled else None
        if kind == "8bit":
            # A restore fills existing tensors: scales are then read sharded, and codes are not coded again.
            self.state.update({p: new_state(p, kind) for group in self.param_groups for p in group["params"]})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter)

    def _update(self, group: Mapping[str, Any], parameter: nn.Parameter) -> None:
        state = self.state[parameter]
        if not state:
            state.update(new_state(parameter, self.kind))
        count = self._count(parameter, state)
        views = _views(parameter, state, self._tables)
        if self._scalars is not None and views.contiguous:
            _update_compiled(views, group, count, self._places[parameter], self._scalars)
            return
        for first, rows in _slices(views.parameter):
            _update_rows(views, first, rows, group, count, self._places[parameter])

    def _count(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> int:
        """The current step. Its number is read from the tensor only after a checkpoint has filled it."""
        known = self._counts.get(parameter)
        if known is not None and known[0] is state["step"]:
            before = known[1]
        else:
            before = int(state["step"].item())
        state["step"].fill_(before + 1)
        self._counts[parameter] = (state["step"], before + 1)
        return before + 1


# ---------------------------------------------------------------- what is kept


def codes(parameter: Tensor, kind: Kind) -> bool:
    """Whether the moments of this parameter are codes and scales."""
    return kind == "8bit" and parameter.dim() >= 2 and parameter.shape[1:].numel() >= SHORTEST_ROW


def moment_bytes(parameter: Tensor, kind: Kind) -> int:
    """Bytes of both moments of the whole parameter."""
    if not codes(parameter, kind):
        return 2 * parameter.numel() * (2 if kind == "bf16" else 4)
    return 2 * (parameter.numel() + 4 * parameter.shape[0] * blocks_of(parameter))


def new_state(parameter: nn.Parameter, kind: Kind) -> dict[str, Tensor]:
    local = _local(parameter)
    state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    for name in MOMENTS:
        if codes(parameter, kind):
            zero = _zero(name)
            state[name] = _like(
                parameter, torch.full(local.shape, zero, dtype=torch.uint8, device=local.device)
            )
            scale = torch.zeros(
                (local.shape[0], blocks_of(parameter)), dtype=torch.float32, device=local.device
            )
            state[f"{name}_scale"] = _like(parameter, scale)
        else:
            dtype = torch.bfloat16 if kind == "bf16" else torch.float32
            state[name] = _like(parameter, torch.zeros(local.shape, dtype=dtype, device=local.device))
    return state


@torch.no_grad()
def adapt_states(optimizer: torch.optim.Optimizer) -> None:
    """After a restore: moments saved in another form are converted to this optimizer's."""
    kind = optimizer.kind if isinstance(optimizer, SmallStateAdam) else None
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if state and "exp_avg_sq" in state and not _has_form(parameter, state, kind):
                optimizer.state[parameter] = _reformed(group, parameter, state, kind)


def _has_form(parameter: nn.Parameter, state: Mapping[str, Tensor], kind: Kind | None) -> bool:
    if kind is None or not codes(parameter, kind):
        wanted = torch.bfloat16 if kind == "bf16" else torch.float32 if kind else parameter.dtype
        return all(state[name].dtype == wanted for name in MOMENTS)
    return all(state[name].dtype == torch.uint8 for name in MOMENTS)


def _reformed(
    group: Mapping[str, Any], parameter: nn.Parameter, state: Mapping[str, Tensor], kind: Kind | None
) -> dict[str, Tensor]:
    fresh = new_state(parameter, kind) if kind is not None else _torchs_state(parameter)
    on_device = kind is None and (group.get("fused") or group.get("capturable"))
    fresh["step"] = state["step"].to(parameter.device if on_device else "cpu", torch.float32)
    written, tables = {key: _local(value) for key, value in fresh.items()}, _Tables()
    for first, rows in _slices(_local(parameter)):
        for name in MOMENTS:
            moment = _read(name, state, tables, first, rows, first_row(parameter))
            _write(name, written, tables, first, rows, moment, None)
    return fresh


def _torchs_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    local = _local(parameter)
    return {name: _like(parameter, torch.zeros_like(local)) for name in MOMENTS}


def _zero(name: str) -> int:
    """The code of 0."""
    return 127 if name == "exp_avg" else 0


# ---------------------------------------------------------------- an update


class _Tables:
    """The map of each moment on each device, made once: the host waits for a copy to a device."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, torch.device], Table] = {}

    def of(self, name: str, device: torch.device) -> Table:
        if (name, device) not in self._made:
            self._made[name, device] = Table.on(device, signed=name == "exp_avg")
        return self._made[name, device]


@dataclass(frozen=True)
class _Views:
    """Local tensors, at least one-dimensional; `first` is the shard's first row in the whole parameter."""

    parameter: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    tables: _Tables
    first: int

    @property
    def contiguous(self) -> bool:
        return all(one.is_contiguous() for one in (self.parameter, self.grad, *self.state.values()))


def _views(parameter: nn.Parameter, state: Mapping[str, Tensor], tables: _Tables) -> _Views:
    assert parameter.grad is not None
    local = {name: _rowed(_local(value)) for name, value in state.items() if name != "step"}
    whole = _rowed(_local(parameter)), _rowed(_local(parameter.grad))
    return _Views(*whole, local, tables, first_row(parameter))


def _slices(local: Tensor, most: int | None = None) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of each slice of at most `most` elements."""
    rows, row = (local.shape[0], local.shape[1:].numel()) if local.dim() else (1, 1)
    step = max(1, (most or SLICE) // max(1, row))
    yield from ((first, min(step, rows - first)) for first in range(0, rows, step))


def _update_rows(
    views: _Views, first: int, rows: int, group: Mapping[str, Any], count: int, place: int
) -> None:
    """torch's AdamW on a few rows."""
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    parameter = views.parameter.narrow(0, first, rows)
    grad = views.grad.narrow(0, first, rows).float()
    mean, square = (_read(name, views.state, views.tables, first, rows, 0) for name in MOMENTS)
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    start = (views.first + first) * parameter.shape[1:].numel()
    noise = functools.partial(noise_at, start, grad, mixed(count, place))
    for name, moment in zip(MOMENTS, (mean, square), strict=True):
        _write(name, views.state, views.tables, first, rows, moment, noise)
    moved = parameter.float() if parameter.dtype == torch.bfloat16 else parameter
    moved.mul_(1 - lr * group["weight_decay"])
    below = square.sqrt_().div_((1 - beta2**count) ** 0.5).add_(group["eps"])
    moved.addcdiv_(mean, below, value=-lr / (1 - beta1**count))
    if moved is not parameter:
        # Bits of their own: those of the moments would round a parameter with its moment.
        parameter.copy_(round_at_random(moved, noise_at(start, moved, mixed(count, place) ^ PARAMETERS)))


def _update_compiled(
    views: _Views, group: Mapping[str, Any], count: int, place: int, scalars: Scalars
) -> None:
    """The same by compiled code, in larger slices: it keeps little between its inputs and its outputs."""
    device, numbers = views.parameter.device, scalars.numbers(group, count, views.parameter.device)
    word = mixed(count, place)
    coded = views.state["exp_avg"].dtype == torch.uint8
    for first, rows in _slices(views.parameter, COMPILED_SLICE):
        whole = views.parameter.narrow(0, first, rows), views.grad.narrow(0, first, rows)
        seeds = scalars.seeds(
            (views.first + first) * whole[0].shape[1:].numel(), word, word ^ PARAMETERS, device
        )
        moments = [views.state[name].narrow(0, first, rows) for name in MOMENTS]
        if not coded:
            compiled_update(update_plain)(*(one.view(-1) for one in (*whole, *moments)), numbers, seeds)
            continue
        scales = tuple(views.state[f"{name}_scale"].narrow(0, first, rows) for name in MOMENTS)
        codes = tuple(one.flatten(1) for one in moments)
        tables = tuple(views.tables.of(name, device) for name in MOMENTS)
        compiled_update(update_coded)(
            *(one.flatten(1) for one in whole), codes, scales, tables, numbers, seeds
        )


def _read(
    name: str, state: Mapping[str, Tensor], tables: _Tables, first: int, rows: int, whole_first: int
) -> Tensor:
    """A moment's rows in fp32. A scale that a checkpoint restored whole is read at this shard's rows."""
    kept = _rowed(_local(state[name])).narrow(0, first, rows)
    if kept.dtype != torch.uint8:
        return kept.to(torch.float32, copy=True)
    scale = state[f"{name}_scale"]
    at = (
        first
        if isinstance(scale, DTensor) or scale.shape[0] == _local(state[name]).shape[0]
        else first + whole_first
    )
    return decode(kept, _local(scale).narrow(0, at, rows), tables.of(name, kept.device))


def _write(
    name: str,
    state: Mapping[str, Tensor],
    tables: _Tables,
    first: int,
    rows: int,
    moment: Tensor,
    noise: Callable[[], Tensor] | None,
) -> None:
    """Converts to the moment's form. Without `noise`, as in a conversion, bf16 is rounded to the nearest."""
    kept = _rowed(state[name]).narrow(0, first, rows)
    if kept.dtype == torch.uint8:
        found, scale = encode(moment, tables.of(name, kept.device))
        kept.copy_(found)
        state[f"{name}_scale"].narrow(0, first, rows).copy_(scale)
    elif kept.dtype == torch.bfloat16 and noise is not None:
        kept.copy_(round_at_random(moment, noise() if name == "exp_avg" else noise() >> 16))
    else:
        kept.copy_(moment)


# ---------------------------------------------------------------- shards


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach()


def _rowed(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.view(1)


def _like(parameter: nn.Parameter, local: Tensor) -> Tensor:
    """A DTensor sharded as the parameter is; only the shape of the rows may differ."""
    if not isinstance(parameter, DTensor):
        return local
    shape = torch.Size((parameter.shape[0], *local.shape[1:])) if local.dim() else torch.Size()
    return like_shard(parameter, local, shape)
