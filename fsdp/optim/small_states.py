"""Adam with moments in bf16 or in 8 bits: half, or a quarter, of fp32's memory. The arithmetic is fp32.

bf16 is rounded stochastically, by a number that follows from the step and the element's place in the whole
parameter: a moment that changes by less than bf16 can represent still moves as far on average, and the bits
are the same at any number of ranks and after any restart, but for weights whose columns tensor ranks divide.
bf16 parameters (--precision.master bf16) are
rounded the same way, by random bits of their own. 8 bits are an index into a table of 256 values (Dettmers'
dynamic map, arXiv 2110.02861, as in bitsandbytes and torchao), times the largest of its block of 256; a block
never crosses a row, so codes and scales are sharded as parameters are.

Vectors, and matrices with short rows, keep fp32 moments under 8 bits. A checkpoint's moments in another form
are refused.

The update is compiled where blocks are, and on CUDA in any case: one kernel a parameter in place of some
fifty a million elements. Its numbers are then tensors of the parameter's device: a number of Python would be
compiled into the code and compiled again when it changes. Its bits differ from eager's in the last places of
fp32, where a compiler contracts a product and a sum. `python -m bench.small_states`, torch 2.13, a matrix of
8M elements, one CPU core, ms a step, the least of 12: fused AdamW 4.2; bf16 eager 70, compiled 14.7; 8 bits
eager 164, compiled 161, torchao's AdamW8bit 239. On one H100 (torch 2.11), over fused AdamW: bf16 eager 42,
compiled 0.81; 8 bits eager 64, compiled 2.55, torchao's 2.08. The goal of 1.5 is open: what takes the time is
the codes' tables, torchao's too. Two other forms of 8 bits are not taken:

- e4m3 with a block scale, which one instruction converts, has three bits of mantissa: a second moment falls
  by at most 1 - beta2 a step, where half of a step of e4m3 is 3.6 to 6.2%, and stays. At beta2 0.95, beside a
  moment of 1 in its block, one whose squared gradients are 0.01 stands at 0.71 after 400 steps; as codes at
  0.023;
- torchao's AdamW8bit has blocks that cross rows, and keeps fp32 where a rank's part is no multiple of 256:
  the states of one mesh are not those of another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp.base.errors import ConfigError
from fsdp.base.torch_private import like_shard
from fsdp.distributed.boxes import box_of, local_tensor

Kind = Literal["bf16", "8bit"]
Views = dict[str, Tensor]
"""Local tensors, at least one-dimensional: the moments, their scales, `parameter` and `grad`."""

MOMENTS = ("exp_avg", "exp_avg_sq")
SHORTEST_ROW = 64
"""Elements of a row from which on 8 bits save more than their scales take."""
PARAMETERS = 0x27D4EB2F
"""Distinguishes the random bits of a parameter from those of its moments."""
SLICE = 1 << 20
"""Elements that are widened to fp32 at a time."""
COMPILED_SLICE = 1 << 26
"""Larger: compiled code keeps little between its inputs and its outputs."""
BLOCK = 256
"""Elements that share a scale."""


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
        """`places` numbers the parameters the same way at any number of ranks."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.kind = kind
        self._places, self._compiled = places, compiled
        self._counts: dict[nn.Parameter, tuple[Tensor, int]] = {}
        self._table = functools.cache(Table.on)  # the host waits for a copy to a device
        self._numbers: dict[tuple[int, torch.device], tuple[tuple[float, ...], tuple[Tensor, ...]]] = {}
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
        tensors = {**state, "parameter": parameter, "grad": parameter.grad}
        views = {name: _rowed(_local(value)) for name, value in tensors.items() if name != "step"}
        compiled = self._compiled and all(view.is_contiguous() for view in views.values())
        update = self._update_compiled if compiled else self._update_eager
        box = box_of(parameter)
        word = mixed(count, self._places[parameter])
        if not box.contiguous:  # tensor ranks have columns, of which each draws bits of its own
            word = mixed(word, 1 + sum(box.offsets[1:]))
        for first, rows in _slices(views["parameter"], COMPILED_SLICE if compiled else SLICE):
            part = {name: view.narrow(0, first, rows) for name, view in views.items()}
            start = (box.offsets[0] + first) * part["parameter"].shape[1:].numel()
            update(part, group, count, start, word)

    def _count(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> int:
        """The current step. Its number is read from the tensor only after a checkpoint has filled it."""
        known = self._counts.get(parameter)
        before = known[1] if known is not None and known[0] is state["step"] else int(state["step"].item())
        state["step"].fill_(before + 1)
        self._counts[parameter] = state["step"], before + 1
        return before + 1

    def _update_eager(self, part: Views, group: Mapping[str, Any], count: int, start: int, word: int) -> None:
        """torch's AdamW on a few rows."""
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        parameter, grad = part["parameter"], part["grad"].float()
        mean, square = (_read(name, part, self._table) for name in MOMENTS)
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        noise = functools.partial(noise_at, start, grad, word)
        for name, moment in zip(MOMENTS, (mean, square), strict=True):
            _write(name, part, self._table, moment, noise)
        moved = parameter.float() if parameter.dtype == torch.bfloat16 else parameter
        moved.mul_(1 - lr * group["weight_decay"])
        below = square.sqrt_().div_((1 - beta2**count) ** 0.5).add_(group["eps"])
        moved.addcdiv_(mean, below, value=-lr / (1 - beta1**count))
        if parameter.dtype == torch.bfloat16:
            # Bits of its own: those of the moments would round a parameter with its moment.
            parameter.copy_(round_at_random(moved, noise_at(start, moved, word ^ PARAMETERS)))

    def _update_compiled(
        self, part: Views, group: Mapping[str, Any], count: int, start: int, word: int
    ) -> None:
        device = part["parameter"].device
        numbers = self._numbers_of(group, count, device)
        seeds = tuple(
            torch.full((), signed(seed), dtype=torch.int32, device=device)
            for seed in (start, word, word ^ PARAMETERS)
        )
        if part["exp_avg"].dtype != torch.uint8:
            flat = (part[name].view(-1) for name in ("parameter", "grad", *MOMENTS))
            compiled(update_plain)(*flat, numbers, seeds)
            return
        compiled(update_coded)(
            *(part[name].flatten(1) for name in ("parameter", "grad")),
            tuple(part[name].flatten(1) for name in MOMENTS),
            tuple(part[f"{name}_scale"] for name in MOMENTS),
            tuple(self._table(device, signed=name == "exp_avg") for name in MOMENTS),
            numbers,
            seeds,
        )

    def _numbers_of(self, group: Mapping[str, Any], count: int, device: torch.device) -> tuple[Tensor, ...]:
        """This step's scalars, made by fills on the device, for which the host does not wait."""
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        corrected = lr / (1 - beta1**count), (1 - beta2**count) ** 0.5
        values = (*corrected, 1 - lr * group["weight_decay"], beta1, beta2, group["eps"])
        known = self._numbers.get((id(group), device))
        if known is None or known[0] != values:
            made = tuple(torch.full((), value, dtype=torch.float32, device=device) for value in values)
            known = self._numbers[id(group), device] = (values, made)
        return known[1]


# ---------------------------------------------------------------- states and their shards


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
    coded = codes(parameter, kind)
    dtype = torch.uint8 if coded else torch.bfloat16 if kind == "bf16" else torch.float32
    for name in MOMENTS:
        zero = 127 if coded and name == "exp_avg" else 0  # the code of 0
        state[name] = _like(parameter, torch.full(local.shape, zero, dtype=dtype, device=local.device))
        if coded:
            scale = torch.zeros(
                (local.shape[0], blocks_of(parameter)), dtype=torch.float32, device=local.device
            )
            state[f"{name}_scale"] = _like(parameter, scale)
    return state


def check_states(optimizer: torch.optim.Optimizer) -> None:
    """After a restore: refuses moments that were saved in another form than this optimizer's."""
    kind = optimizer.kind if isinstance(optimizer, SmallStateAdam) else None
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        state = optimizer.state.get(parameter) or {}
        form = {None: parameter.dtype, "bf16": torch.bfloat16, "8bit": torch.float32}[kind]
        if kind is not None and codes(parameter, kind):
            form = torch.uint8
        stored = state["exp_avg"].dtype if "exp_avg_sq" in state else form
        if stored != form:
            raise ConfigError(
                f"the checkpoint's moments are {stored}, and --optim.state {kind or 'master'} keeps {form}.",
                "the --optim.state and --precision.master that it was saved with, or a new run with "
                "--model.weights RUN/full_model",
            )


def _slices(rowed: Tensor, most: int) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of each slice of at most `most` elements."""
    rows, step = rowed.shape[0], max(1, most // max(1, rowed.shape[1:].numel()))
    yield from ((first, min(step, rows - first)) for first in range(0, rows, step))


def _read(name: str, part: Views, table: Callable[..., Table]) -> Tensor:
    """A moment's rows in fp32."""
    stored = part[name]
    if stored.dtype != torch.uint8:
        return stored.to(torch.float32, copy=True)
    return decode(stored, part[f"{name}_scale"], table(stored.device, signed=name == "exp_avg"))


def _write(
    name: str, part: Views, table: Callable[..., Table], moment: Tensor, noise: Callable[[], Tensor]
) -> None:
    """Converts to the moment's form."""
    stored = part[name]
    if stored.dtype == torch.uint8:
        coded, scale = encode(moment, table(stored.device, signed=name == "exp_avg"))
        stored.copy_(coded)
        part[f"{name}_scale"].copy_(scale)
    elif stored.dtype == torch.bfloat16:
        stored.copy_(round_at_random(moment, noise() if name == "exp_avg" else noise() >> 16))
    else:
        stored.copy_(moment)


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach()


def _rowed(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.view(1)


def _like(parameter: nn.Parameter, local: Tensor) -> Tensor:
    """A DTensor sharded as the parameter is; only the shape of the rows may differ."""
    if not isinstance(parameter, DTensor):
        return local
    shape = parameter.shape
    if local.shape != local_tensor(parameter).shape:
        shape = torch.Size((shape[0], *local.shape[1:]))
    return like_shard(parameter, local, shape)


# ---------------------------------------------------------------- the compiled update

Scalars = tuple[Tensor, ...]


def update_plain(
    parameter: Tensor, grad: Tensor, mean: Tensor, square: Tensor, numbers: Scalars, seeds: Scalars
) -> None:
    """One-dimensional tensors; moments in bf16, rounded stochastically, or in fp32."""
    new_mean, new_square = _moments(grad, mean.float(), square.float(), numbers)
    _move(parameter, new_mean, new_square, numbers, seeds)
    if mean.dtype == torch.bfloat16:
        noise = hashed(_places(mean, seeds), seeds[1])
        new_mean, new_square = round_at_random(new_mean, noise), round_at_random(new_square, noise >> 16)
    mean.copy_(new_mean)
    square.copy_(new_square)


def update_coded(
    parameter: Tensor,
    grad: Tensor,
    coded: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    tables: tuple[Table, Table],
    numbers: Scalars,
    seeds: Scalars,
) -> None:
    """Two-dimensional tensors; moments in 8 bits."""
    mean, square = (decode(*moment) for moment in zip(coded, scales, tables, strict=True))
    moments = _moments(grad, mean, square, numbers)
    _move(parameter, *moments, numbers, seeds)
    for moment, code, scale, table in zip(moments, coded, scales, tables, strict=True):
        new_code, new_scale = encode(moment, table)
        code.copy_(new_code)
        scale.copy_(new_scale)


def _moments(grad: Tensor, mean: Tensor, square: Tensor, numbers: Scalars) -> tuple[Tensor, Tensor]:
    grad, (_, _, _, beta1, beta2, _) = grad.float(), numbers
    return mean + (1 - beta1) * (grad - mean), beta2 * square + (1 - beta2) * grad * grad


def _move(parameter: Tensor, mean: Tensor, square: Tensor, numbers: Scalars, seeds: Scalars) -> None:
    rate, correction, decayed, _, _, eps = numbers
    moved = parameter.float() * decayed - rate * (mean / (square.sqrt() / correction + eps))
    if parameter.dtype == torch.bfloat16:
        moved = round_at_random(moved, hashed(_places(parameter, seeds), seeds[2]))
    parameter.copy_(moved)


def _places(like: Tensor, seeds: Scalars) -> Tensor:
    places = torch.arange(like.numel(), dtype=torch.int32, device=like.device) + seeds[0]
    return places.view(like.shape)


@functools.cache
def compiled(update: Callable[..., None]) -> Callable[..., None]:
    """Sizes are symbols: the shapes of a model, and the ends of uneven shards, share their code."""
    made: Callable[..., None] = torch.compile(update, dynamic=True, fullgraph=True)
    return made


# ---------------------------------------------------------------- numbers in fewer bits


def round_at_random(value: Tensor, noise: Tensor) -> Tensor:
    """Rounds fp32 to the bf16 above or below, more often to the nearer: `noise` has sixteen random bits an
    element.
    """
    bits = value.contiguous().view(torch.int32)
    return ((bits + (noise & 0xFFFF)) & -0x10000).view(torch.float32).to(torch.bfloat16)


def noise_at(start: int, like: Tensor, seed: int) -> Tensor:
    """32 random bits for each element, from its place alone."""
    places = torch.arange(like.numel(), dtype=torch.int32, device=like.device)
    places += signed(start)
    return hashed(places, signed(seed)).view(like.shape)


def hashed(places: Tensor, seed: Tensor | int) -> Tensor:
    """Wellons' lowbias32 of place and seed, both int32."""
    x = places ^ seed
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= (x >> shift) & ((1 << (32 - shift)) - 1)  # >> keeps the sign
        x *= signed(factor)
    return x ^ ((x >> 16) & 0xFFFF)


def mixed(step: int, place: int) -> int:
    return (step * 0x9E3779B1 + place * 0x85EBCA77 + 0x165667B1) & 0xFFFFFFFF


def signed(word: int) -> int:
    """A word of 32 bits as int32."""
    return (word + 0x80000000) % 0x100000000 - 0x80000000


@functools.cache
def dynamic_map(signed: bool) -> tuple[float, ...]:
    """256 values within [-1, 1]: seven decades, finer for larger values; 0 and 1 are among them."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (0 if signed else 1)) + 1)
        middles = (10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2).tolist()
        values += middles + ([-value for value in middles] if signed else [])
    return tuple(sorted(values))


class Table(NamedTuple):
    """A dynamic map on a device, and what finds the nearest of its values without a search.

    fp32 with one upper half of its bits lie so close together that at most two codes are nearest to them:
    `lowest` has the smaller by the upper half, and one comparison decides. Four times (first moments) and
    seven times (second) as fast as torch.bucketize on one core, with the same codes.
    """

    values: Tensor
    lowest: Tensor
    middles: Tensor
    """Between each value and the next; after the last, infinity."""

    @classmethod
    def on(cls, device: torch.device, *, signed: bool) -> Table:
        return cls(*(torch.tensor(part, device=device) for part in _parts(signed)))


@functools.cache
def _parts(signed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    values = np.array(dynamic_map(signed), dtype=np.float32)
    middles = (values[:-1] + values[1:]) / 2
    halves = np.arange(1 << 16, dtype=np.uint32) << 16
    # Of negative numbers the longest bits are the lowest number.
    lowest = np.where(halves >> 31, halves | 0xFFFF, halves).astype(np.uint32).view(np.float32)
    codes = np.searchsorted(middles, lowest).astype(np.uint8)
    return values, codes, np.append(middles, np.float32(np.inf))


def encode(moment: Tensor, table: Table) -> tuple[Tensor, Tensor]:
    """Codes of the moment's shape, and a scale for each block of each row."""
    blocks = _in_blocks(moment)
    scale = blocks.abs().amax(-1)
    relative = blocks * torch.where(scale > 0, 1 / scale, 0).unsqueeze(-1)
    coded = table.lowest[(relative.view(torch.int32) >> 16) & 0xFFFF]
    coded += relative > table.middles[coded.int()]
    row = moment.shape[1:].numel()
    return coded.flatten(1)[:, :row].view(moment.shape), scale


def decode(coded: Tensor, scale: Tensor, table: Table) -> Tensor:
    values = _in_blocks(table.values[coded.int()]) * scale.unsqueeze(-1)
    return values.flatten(1)[:, : coded.shape[1:].numel()].reshape(coded.shape)


def _in_blocks(moment: Tensor) -> Tensor:
    """(rows, blocks, BLOCK); a row's last block is filled up with zeros."""
    flat = moment.flatten(1)
    count = -(-flat.shape[1] // BLOCK)
    return nn.functional.pad(flat, (0, count * BLOCK - flat.shape[1])).view(flat.shape[0], count, BLOCK)


def blocks_of(parameter: Tensor) -> int:
    return -(-parameter.shape[1:].numel() // BLOCK)
