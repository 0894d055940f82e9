"""Activation checkpointing: a unit keeps nothing from forward to backward, all, all but some operations, or a
budget.

A unit's forward is replaced on the instance: no wrapper, so no name changes. Where units are compiled the
compiler keeps the budget; elsewhere each unit is run once to measure its operations, and those worth most
computation a byte are kept until the budget is spent. Not here: where kept activations are stored
(offload.py).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import flop_registry

from fsdp.base.errors import ConfigError
from fsdp.base.torch_private.fake import FakeTensor, TorchDispatchMode
from fsdp.base.torch_private.tensors import (
    attention_products,
    float8_product,
    set_compiler_activation_budget,
    tree_leaves,
    writes,
)
from fsdp.config import MemorySection
from fsdp.models.blocks import blocks_of

NO_RECOMPUTATION = "--memory.activation_checkpointing none --memory.activation_budget 1"

Forward = Callable[..., Any]
Key = tuple[Any, int]
"""An operation and the index of its call in a forward."""


@functools.cache
def _products() -> frozenset[Any]:
    """Operators whose results are kept. Not a constant: torch's varlen loads torch._dynamo."""
    aten: Any = torch.ops.aten
    matrices = (aten.mm.default, aten.addmm.default, aten.bmm.default)
    return frozenset((*matrices, *attention_products(), float8_product()))


def apply_activation_checkpointing(
    units: Sequence[list[nn.Module]],
    memory: MemorySection,
    *,
    compiled: bool = False,
    root: nn.Module | None = None,
) -> None:
    """Applied before the units are compiled and sharded. Messages name a unit by its place in `root`."""
    budget, kind = memory.activation_budget, memory.activation_checkpointing
    if kind == "none" and budget == 1:
        return
    blocks = blocks_of(units)
    flag = f"activation_checkpointing {kind}" if budget == 1 else f"activation_budget {budget:g}"
    if not blocks:
        raise ConfigError(
            f"--memory.{flag} works on units, and this model has none.",
            "--mesh.wrap class:NAME says which modules are units",
        )
    if compiled and budget < 1:
        set_compiler_activation_budget(budget)
        return
    names = {module: name for name, module in root.named_modules()} if root is not None else {}
    for block in blocks[:: memory.activation_checkpointing_every]:
        block.forward = _Stateless(block, names.get(block, ""), flag)  # type: ignore[method-assign]
        wrapped = (
            Budgeted(block, budget) if budget < 1 else _checkpointed(block.forward, per_op=kind == "ops")
        )
        block.forward = wrapped  # type: ignore[method-assign]


def _checkpointed(forward: Forward, per_op: bool) -> Forward:
    context = functools.partial(create_selective_checkpoint_contexts, _keep_products) if per_op else None
    arguments: dict[str, Any] = {"use_reentrant": False, **({"context_fn": context} if context else {})}
    return functools.partial(checkpoint, forward, **arguments)


def _keep_products(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _products() else CheckpointPolicy.PREFER_RECOMPUTE


# ---------------------------------------------------------------- what cannot be computed twice


class _Stateless:
    """A unit's forward. Its first call in training is refused if it changes a tensor of the unit in
    place, or a number that it counts: backward would change them a second time. Compiled code and the
    planner's fake tensors are not checked.
    """

    def __init__(self, block: nn.Module, name: str, flag: str) -> None:
        self._block, self._forward, self._name, self._flag = block, block.forward, name, flag
        self._checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._checked or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        self._checked = True
        before = dict(self._state())
        out = self._forward(*args, **kwargs)
        after = dict(self._state())
        changed = [name for name, value in before.items() if name in after and after[name] != value]
        if changed:
            raise self._refusal(changed[0])
        return out

    def _state(self) -> Iterator[tuple[str, float]]:
        """Each tensor by its identity and version, each number by itself. Replacing one by another is no
        change: the old one is not read.
        """
        for prefix, module in self._block.named_modules(prefix=self._name):
            buffers = module.named_buffers(recurse=False, remove_duplicate=False)
            for key, value in (*buffers, *vars(module).items()):
                name = f"{prefix}.{key}".lstrip(".")
                if (
                    isinstance(value, Tensor)
                    and not isinstance(value, FakeTensor)
                    and not value.is_inference()
                ):
                    yield f"{name}@{id(value)}", writes(value)
                elif type(value) in (int, float):
                    yield f"{name}@", value

    def _refusal(self, changed: str) -> ConfigError:
        return ConfigError(
            f"--memory.{self._flag}: the forward of {self._name or type(self._block).__name__} changes its "
            "own state, "
            f"{changed.partition('@')[0]}, and backward would change it a second time.",
            NO_RECOMPUTATION,
        )


def refused_recomputation(error: Exception) -> ConfigError | None:
    """The ConfigError for a unit whose second forward differs from its first; None for other errors."""
    if not isinstance(error, CheckpointError) and "backward but not found in storage" not in str(error):
        return None
    first = " ".join(str(error).split("\n")[0].split())
    return ConfigError(
        f"a unit's forward computes something else when backward repeats it ({first[:160]}): it changes "
        "its own state or "
        "reads one that changes.",
        NO_RECOMPUTATION,
    )


# ---------------------------------------------------------------- a budget, without a compiler


@dataclass(frozen=True)
class Produced:
    """Cost of one operation of a forward: bytes to keep its output, floating point operations to repeat
    it.
    """

    key: Key
    nbytes: int
    flops: float


@dataclass(frozen=True)
class Measured:
    """A unit's forward: bytes that it keeps for backward by itself, those of its inputs, and the outputs
    that could be kept instead.
    """

    kept: int
    inputs: int
    produced: Sequence[Produced]


@dataclass(frozen=True)
class RecomputePlan:
    """`keep` is kept besides the inputs; None recomputes nothing."""

    keep: frozenset[Key] | None
    nbytes: int


def choose(measured: Measured, budget: float) -> RecomputePlan:
    """Chooses within `budget` of what the unit keeps by itself. Inputs are kept whatever the budget:
    recomputation starts from them.
    """
    limit = budget * measured.kept
    spent, keep = measured.inputs, set()
    for one in sorted(measured.produced, key=lambda one: -one.flops / one.nbytes):
        if spent + one.nbytes <= limit:
            spent += one.nbytes
            keep.add(one.key)
    return (
        RecomputePlan(frozenset(keep), spent) if spent < measured.kept else RecomputePlan(None, measured.kept)
    )


class Budgeted:
    """A unit's forward within its budget; the first in training runs twice, once to measure it."""

    def __init__(self, block: nn.Module, budget: float) -> None:
        self._block, self._forward, self._budget = block, block.forward, budget
        self.plan: RecomputePlan | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if self.plan is None:
            self.plan = choose(measure(self._block, self._forward, args, kwargs), self._budget)
        keep = self.plan.keep
        if keep is None:
            return self._forward(*args, **kwargs)
        if not keep:
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        contexts = functools.partial(_contexts, keep)
        return checkpoint(self._forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(keep: frozenset[Key]) -> Any:
    """Built for each forward, so that its calls are counted from the first."""
    counts: tuple[Counter[Any], Counter[Any]] = (Counter(), Counter())

    def policy(context: Any, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
        count = counts[bool(context.is_recompute)]
        count[op] += 1
        return (
            CheckpointPolicy.MUST_SAVE if (op, count[op] - 1) in keep else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return create_selective_checkpoint_contexts(policy)


def measure(block: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Measured:
    """One forward without side effects: random streams and buffers are restored."""
    own = {_storage(t) for t in [*block.parameters(), *block.buffers()]}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in own:
            saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    inputs = {
        _storage(t): t.untyped_storage().nbytes()
        for t in tree_leaves((args, kwargs))
        if isinstance(t, Tensor)
    }
    inputs = {storage: nbytes for storage, nbytes in inputs.items() if storage not in own}
    recorder = _Recorder()
    with _unwritten(block), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), recorder:
        forward(*args, **kwargs)
    return Measured(
        sum({**saved, **inputs}.values()), sum(inputs.values()), recorder.produced(set(inputs) | own)
    )


@contextmanager
def _unwritten(block: nn.Module) -> Iterator[None]:
    buffers = [(buffer, buffer.clone()) for buffer in block.buffers()]
    with torch.random.fork_rng():
        yield
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def _storage(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())


class _Recorder(TorchDispatchMode):
    """Every operation with its outputs, counted as selective checkpointing counts them."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[Any] = Counter()
        self._made: list[tuple[Key, list[Tensor], list[int], set[int], float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in SAC_IGNORED_OPS:
            return out
        key = (func, self._counts[func])
        self._counts[func] += 1
        tensors = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        taken = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        # Held until the end: the address of a freed storage may be another's later.
        self._made.append(
            (key, tensors, [writes(t) for t in tensors], taken, _flops(func, args, kwargs, out))
        )
        return out

    def produced(self, known: set[int]) -> list[Produced]:
        """Outputs with memory of their own that are not written afterwards: a kept value must be
        unchanged.
        """
        found = []
        for key, tensors, versions, taken, flops in self._made:
            storages = {_storage(t): t.untyped_storage().nbytes() for t in tensors}
            changed = any(writes(t) != version for t, version in zip(tensors, versions, strict=True))
            if storages and not changed and not storages.keys() & (taken | known) and sum(storages.values()):
                found.append(Produced(key, sum(storages.values()), flops))
        return found


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Operations as torch counts them; for others one an element."""
    count = flop_registry.get(func.overloadpacket)
    if count is not None:
        return float(count(*args, **(kwargs or {}), out_val=out))
    return float(sum(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)))
