"""Do all ranks run the same parts of the model? FSDP pairs collectives by their order alone: ranks that take
different branches (LayerDrop with a stream of its own on each rank, an expert that one rank alone uses)
reduce the gradient of one parameter into another, without an error where shapes agree.

Each step's forward order of units and the parameters of its reductions make one number, the signature. It
travels with the sum of the step's loss; ranks that differ are found before the update on CPU, and behind the
next step on a device, whose loss the host does not wait for. Measured on CPU for 58 parameters in 7 groups
(292 in 33): 1.2 (1.7) µs with warm caches, 17 (32) µs within a step. Not here: ranks that issue a different
number of collectives; they hang, which fsdp/watch/hang_verdict.py reports.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from fsdp.base.errors import TrainingError
from fsdp.dist import collectives
from fsdp.memory.account import groups_of
from fsdp.parallel.shard import Sharded

BITS = 20
"""Of a signature: its square, summed over 4,096 ranks, is still exact in float64."""

_Seen = tuple[list[Any], list[list[Any]], list[tuple[int, list[bool]]]]
"""Groups in the order of their forwards; the parameters of each reduction; of groups that are not reduced
yet, which have a gradient.
"""

_Ran = tuple[list[str], list[str]]
"""The names of a rank's units in the order of their forwards, and of its parameters in the order of their
reductions.
"""


class Branches:
    """One sharded model, watched from building to close(). On one rank there is nothing to compare, nor under
    DDP, where Sharded.micro_batch names what the reducer misses.
    """

    def __init__(self, sharded: Sharded) -> None:
        self._ranks = sharded.ranks
        self._groups: list[Any] = list(groups_of(sharded.root)) if self._ranks > 1 else []
        self._reductions: list[list[Any]] = []
        self._now: _Seen = [], [], []
        self._before = self._now
        self._signature = 0
        module: Any = _fsdp_param_group
        self._original = module.foreach_reduce
        if self._groups:
            module.foreach_reduce = self._noted

    def close(self) -> None:
        module: Any = _fsdp_param_group
        module.foreach_reduce = self._original

    def _noted(self, parameters: list[Any], *rest: Any, **named: Any) -> Any:
        self._reductions.append(parameters)
        return self._original(parameters, *rest, **named)

    def signature(self) -> int:
        """Called when the backward has computed all gradients and before FSDP ends it: the root's group is
        not reduced yet, nor a group whose inputs need no gradient, and the order of the forwards is still
        there.
        """
        if not self._groups:
            return 0
        done = TrainingState.POST_BACKWARD
        late = [
            (at, _unreduced(group))
            for at, group in enumerate(self._groups)
            if group._training_state is not done
        ]
        seen = self._groups[0].comm_ctx.post_forward_order, self._reductions, late
        # Lists of the same objects are equal by their addresses: no parameter is touched, which out of cache
        # takes a microsecond each.
        self._before, self._reductions = self._now, []
        if seen != self._now:
            self._now = list(seen[0]), *seen[1:]
            self._signature = zlib.crc32(repr(self._ran(self._now)).encode()) >> (32 - BITS)
        return self._signature

    def check(self, step: int, sums: Sequence[float], *, last: bool = True) -> None:
        """`sums`: over all ranks, of the signatures and of their squares, of the last step or of the one
        before it. They are those of equal numbers only where all are equal: every rank comes to the same
        verdict. Collective where they differ.
        """
        first, second = (int(number) for number in sums)
        if self._ranks * second != first**2:
            raise _difference(step, collectives.everyones(self._ran(self._now if last else self._before)))

    def _ran(self, seen: _Seen) -> _Ran:
        order, reductions, late = seen
        reduced = [one._param_fqn for parameters in reductions for one in parameters]
        for at, held in late:
            reduced += [
                one._param_fqn for one, has in zip(self._groups[at].fsdp_params, held, strict=True) if has
            ]
        return [group._module_fqn or "the root" for group in order], reduced


def _unreduced(group: Any) -> list[bool]:
    """Which parameters of a group hold a gradient that is not reduced yet."""
    found = []
    for one in group.fsdp_params:
        gathered = getattr(one, "_unsharded_param", None)
        found.append(
            one.unsharded_accumulated_grad is not None or (gathered is not None and gathered.grad is not None)
        )
    return found


def _difference(step: int, ran: Sequence[_Ran]) -> TrainingError:
    """Between rank 0 and the first rank that differs from it."""
    other = next(rank for rank, one in enumerate(ran) if one != ran[0])
    (units, reduced), (other_units, other_reduced) = ran[0], ran[other]
    fewer, more = Counter(other_reduced), Counter(reduced)
    here, there = list(more - fewer), list(fewer - more)
    if here or there:
        name, with_it, without = (here[0], 0, other) if here else (there[0], other, 0)
        others = f" (and {len(here) + len(there) - 1} more parameters)" if len(here) + len(there) > 1 else ""
        what = f"{name}{others} has a gradient on rank {with_it} and none on rank {without}"
    else:
        pairs = zip((*units, *reduced), (*other_units, *other_reduced), strict=False)
        mine, theirs = next((pair for pair in pairs if pair[0] != pair[1]), ("more", "less"))
        what = f"rank 0 runs {mine} where rank {other} runs {theirs}"
    return TrainingError(
        f"step {step}: ranks run different parts of the model, so reductions mix gradients of different parameters: {what}.",
        "draw what is left out from a generator with the same seed on every rank, or add 0 * part(x).sum() to the loss for "
        "a part that a rank does not use",
        ranks=(0, other),
    )
