"""The parameters that Muon updates, by name and shape alone: the same ones however the model is wrapped.

Keller Jordan's rule (github.com/KellerJordan/Muon): matrices of the body, without embeddings, head, norms and
biases; experts, three-dimensional, are none. The body is what repeats: a numbered module is in it if another
number in its place has a matrix of the same name and shape.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp.base.errors import ConfigError
from fsdp.distributed import collectives
from fsdp.distributed.boxes import local_tensor, rows_of, shard_axis, shard_count
from fsdp.models.lora import matching, patterns
from fsdp.models.units import clean_name

FLAG = "--optim.muon_parameters"

Place = tuple[str, str]
"""A numbered module: the name of what holds it, and its number."""


def hidden_matrices(model: nn.Module, wanted: str = "") -> list[nn.Parameter]:
    """The trained matrices for Muon, in the model's order. `wanted`: patterns in place of the rule."""
    # Beside the matrices of stacked experts, those of two dims are a vector of each expert.
    own = [[*module.parameters(recurse=False)] for module in model.modules()]
    vectors = {p for some in own if any(p.dim() == 3 for p in some) for p in some if p.dim() == 2}
    everything = model.named_parameters(remove_duplicate=False)
    named = {clean_name(name): p for name, p in everything if p not in vectors}
    if wanted:
        trained = [name for name, p in named.items() if p.requires_grad and p.dim() == 2]
        names = matching(patterns(wanted), trained, FLAG, "trained matrix")
        return list(dict.fromkeys(named[name] for name in names))
    repeated = set(_repeated(named))
    embedded = {m.weight for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    matrices = [
        parameter
        for name, parameter in named.items()
        if parameter.dim() == 2
        and parameter.requires_grad
        and parameter not in embedded
        and any(place in repeated for place, _ in _places(name))
    ]
    if not matrices:
        raise ConfigError(
            "--optim.name muon finds no matrix inside repeated blocks of this model.",
            f"{FLAG} '*.weight' names them, or --optim.name adamw",
        )
    return list(dict.fromkeys(matrices))


def _places(name: str) -> Iterator[tuple[Place, str]]:
    """The numbered modules around a parameter, each with the parameter's name inside it."""
    parts = name.split(".")
    for at, part in enumerate(parts[:-1]):
        if part.isdigit():
            yield (".".join(parts[:at]), part), ".".join(parts[at + 1 :])


def _repeated(named: dict[str, nn.Parameter]) -> Iterator[Place]:
    alike: dict[tuple[str, str, tuple[int, ...]], set[Place]] = defaultdict(set)
    for name, parameter in named.items():
        for place, inside in _places(name) if parameter.dim() == 2 else ():
            alike[place[0], inside, tuple(parameter.shape)].add(place)
    for places in alike.values():
        if len(places) > 1:
            yield from places


OWNED = 1 << 26
"""Elements of a rank's own matrices in one round: 128 MiB of bf16 for each of its buffers."""


@dataclass(frozen=True)
class Matrix:
    """The shape of a whole matrix, and the number of shards it is divided into: 1 if it is whole on each
    rank.
    """

    rows: int
    columns: int
    shards: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def cost(self) -> int:
        """Operations of a Newton–Schulz step, up to a factor."""
        short, long = sorted((self.rows, self.columns))
        return short * short * (2 * long + short)

    def rows_of(self, rank: int) -> slice:
        rows = rows_of(self.rows, rank % self.shards, self.shards)
        return slice(rows.start, rows.stop)

    def size_on(self, rank: int) -> int:
        return len(rows_of(self.rows, rank % self.shards, self.shards)) * self.columns

    def same_replica(self, rank: int, other: int) -> bool:
        return rank // self.shards == other // self.shards


def matrix_of(parameter: Tensor) -> Matrix:
    if isinstance(parameter, DTensor):
        last = parameter.device_mesh.ndim - 1
        assert shard_axis(parameter) in (None, last), "sharded along the last axis of the mesh"
    rows, columns = parameter.shape
    return Matrix(rows, columns, shard_count(parameter))


Round = list[list[int]]
"""The matrices that each rank owns, by rank."""


def rounds(matrices: Sequence[Matrix], ranks: int, owned: int = OWNED) -> list[Round]:
    """Every matrix in one round and with one owner: costliest first, each to the rank that has least. A round
    has at most `owned` elements a rank, and at least one matrix for each.
    """
    made: list[Round] = []
    count = size = 0
    cost: list[int] = []
    for at in sorted(range(len(matrices)), key=lambda at: (-matrices[at].cost, at)):
        if not made or (count >= ranks and size + matrices[at].numel > owned * ranks):
            made.append([[] for _ in range(ranks)])
            count, size, cost = 0, 0, [0] * ranks
        owner = cost.index(min(cost))
        made[-1][owner].append(at)
        cost[owner] += matrices[at].cost
        count, size = count + 1, size + matrices[at].numel
    return made


def apply_to_whole(
    matrices: Sequence[Matrix],
    owned: Round,
    rows: Callable[[int], Tensor],
    change: Callable[[Tensor], Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[int, Tensor]]:
    """(matrix, this rank's rows of `change` of the whole matrix) for each matrix of a round. Collective.

    `rows` returns this rank's rows, which are sent in `dtype`, the dtype of the result.
    """
    rank, ranks = collectives.this_rank(), range(len(owned))
    mine = owned[rank]

    def between(some: list[int], sender: int, receiver: int) -> list[int]:
        """Those of which the sender's rows go to the receiver, their owner."""
        return [at for at in some if matrices[at].same_replica(sender, receiver)]

    sent = [[rows(at).to(device, dtype) for at in between(owned[other], rank, other)] for other in ranks]
    sizes = [[matrices[at].size_on(other) for at in between(mine, other, rank)] for other in ranks]
    received = _exchange(sent, sizes, device, dtype)
    del sent
    parts: dict[int, list[Tensor]] = {at: [] for at in mine}
    for other in ranks:
        for at, part in zip(between(mine, other, rank), received[other], strict=True):
            parts[at].append(part)
    results = {}
    for at in mine:
        results[at] = change(torch.cat(parts.pop(at)).view(matrices[at].rows, matrices[at].columns))
    del received
    back = [[results[at][matrices[at].rows_of(other)] for at in mine] for other in ranks]
    returned = _exchange(back, [[matrices[at].size_on(rank) for at in some] for some in owned], device, dtype)
    for some, pieces in zip(owned, returned, strict=True):
        yield from (
            (at, piece.view(-1, matrices[at].columns)) for at, piece in zip(some, pieces, strict=True)
        )


def _exchange(
    sent: list[list[Tensor]], sizes: list[list[int]], device: torch.device, dtype: torch.dtype
) -> list[list[Tensor]]:
    """Sends each rank its tensors, flat, and returns those of each rank, of these `sizes`. Collective."""
    flat = [tensor.reshape(-1) for tensors in sent for tensor in tensors]
    received = collectives.all_to_all(
        torch.cat(flat or [torch.empty(0, dtype=dtype, device=device)]),
        [sum(tensor.numel() for tensor in tensors) for tensors in sent],
        [sum(numels) for numels in sizes],
    )
    pieces = iter(received.split([numel for numels in sizes for numel in numels]))
    return [[next(pieces) for _ in numels] for numels in sizes]


log = logging.getLogger(__name__)

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration (kellerjordan.github.io/posts/muon), as in torch.optim.Muon."""
STEPS = 5
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
    ) -> None:
        group = {"params": [*matrices], "lr": lr, "weight_decay": weight_decay, "momentum": momentum}
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
        updates = apply_to_whole(
            self._shapes,
            owned,
            lambda at: self._direction(group, parameters[at]),
            orthogonalized,
            dtype=DTYPE,
            device=_compute_device(parameters[0]),
        )
        for at, update in updates:
            parameter = parameters[at]
            if parameter.grad is not None:
                # Of AdamW's size: arXiv 2502.16982
                local, ratio = local_tensor(parameter), 0.2 * math.sqrt(max(parameter.shape))
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


def orthogonalized(matrix: Tensor) -> Tensor:
    """About U Vᵀ of the matrix's singular value decomposition U S Vᵀ, by the Newton–Schulz iteration.
    Overwrites the matrix.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    wide = matrix.T if tall else matrix
    wide.div_(wide.norm().clamp(min=EPS))
    for _ in range(STEPS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if tall else wide


def _compute_device(parameter: Tensor) -> torch.device:
    """The device of the collectives: offloaded shards are on the host."""
    if isinstance(parameter, DTensor) and parameter.device.type != parameter.device_mesh.device_type:
        kind = parameter.device_mesh.device_type
        return torch.device(kind, torch.get_device_module(kind).current_device())
    return parameter.device
