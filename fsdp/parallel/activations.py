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
from fsdp.base.torch_private.core import (
    FakeTensor,
    TorchDispatchMode,
    attention_products,
    float8_product,
    set_compiler_activation_budget,
    tree_leaves,
    writes,
)
from fsdp.config import MemorySection
from fsdp.models.units import blocks_of, wrap_hint
from fsdp.parallel.written_tensors import WrittenResults, random_streams, storage_of, written_by

NO_RECOMPUTATION = "--memory.activation_checkpointing none --memory.activation_budget 1"

Forward = Callable[..., Any]
Key = tuple[Any, int]
"""An operation and the index of its call in a forward."""


@functools.cache
def _products() -> frozenset[Any]:
    """Operators whose results are kept. Not a constant: torch's varlen loads the compiler."""
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
            wrap_hint(root),
        )
    if compiled and budget < 1:
        set_compiler_activation_budget(budget)
        return
    names = {module: name for name, module in root.named_modules()} if root is not None else {}
    for block in blocks[:: memory.activation_checkpointing_every]:
        block.forward = _Stateless(block, names.get(block, ""), flag)  # type: ignore[method-assign]
        wrapped = Budgeted(block, budget) if budget < 1 else _checkpointed(block, per_op=kind == "ops")
        block.forward = wrapped  # type: ignore[method-assign]


def _checkpointed(block: nn.Module, per_op: bool) -> Forward:
    return (
        KeptProducts(block) if per_op else functools.partial(checkpoint, block.forward, use_reentrant=False)
    )


class KeptProducts:
    """A unit's forward that keeps its products. One that the unit writes into afterwards is computed again:
    backward would write into what is kept a second time. The first forward in training finds them.
    """

    def __init__(self, block: nn.Module) -> None:
        self._forward = block.forward
        self._written: frozenset[Key] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._kept(frozenset(), self._forward, args, kwargs)
        if self._written is None:
            results, restore = WrittenResults(_products()), random_streams()
            out = self._kept(frozenset(), functools.partial(results.during, self._forward), args, kwargs)
            self._written = results.take()
            if not self._written:
                return out
            del out
            restore()
        return self._kept(self._written, self._forward, args, kwargs)

    @staticmethod
    def _kept(
        written: frozenset[Key], forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        contexts: Callable[[], Any] = (
            functools.partial(_contexts, lambda key: key[0] in _products() and key not in written)
            if written
            else functools.partial(create_selective_checkpoint_contexts, _keep_products)
        )
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _keep_products(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _products() else CheckpointPolicy.PREFER_RECOMPUTE


# ---------------------------------------------------------------- what cannot be computed twice


class _Stateless:
    """A unit's forward. Its first call in training is refused if it changes a tensor of the unit in
    place, a number that it counts, or a key-value cache that it gets: backward would change them a second
    time. Compiled code and the planner's fake tensors are not checked.
    """

    latest = ""
    """The unit of the last forward: in backward, the one that is repeated."""

    def __init__(self, block: nn.Module, name: str, flag: str) -> None:
        self._block, self._forward, self._name, self._flag = block, block.forward, name, flag
        self._checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        _Stateless.latest = self._name or type(self._block).__name__
        if self._checked or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        self._checked = True
        before, caches = dict(self._state()), dict(_cache_sizes(args, kwargs))
        out = self._forward(*args, **kwargs)
        for cache, size in _cache_sizes(args, kwargs):
            if caches[cache] != size:
                raise self._refusal(f"writes into its argument {cache}")
        after = dict(self._state())
        changed = [name for name, value in before.items() if name in after and after[name] != value]
        if changed:
            raise self._refusal(f"changes its own state, {changed[0].partition('@')[0]}")
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

    def _refusal(self, what: str) -> ConfigError:
        name = self._name or type(self._block).__name__
        return ConfigError(
            f"--memory.{self._flag}: the forward of {name} {what}, and backward would change it a second "
            "time.",
            NO_RECOMPUTATION,
        )


def _cache_sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Each key-value cache among the arguments, by its name or place and its type, and its elements."""
    for name, value in (*enumerate(args), *kwargs.items()):
        if callable(getattr(value, "get_seq_length", None)):
            yield f"{name} ({type(value).__name__})", _elements_in(value, set())


def _elements_in(value: Any, seen: set[int]) -> int:
    """Of all tensors that an object holds."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, dict):
        return sum(_elements_in(one, seen) for one in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_elements_in(one, seen) for one in value)
    return _elements_in(vars(value), seen) if hasattr(value, "__dict__") else 0


REPEATED = (
    "backward but not found in storage",
    "cached during selective activation checkpoint has been mutated",
)
"""Of torch's errors of selective recomputation, which have no class of their own."""


def refused_recomputation(error: Exception) -> ConfigError | None:
    """The ConfigError for a unit whose second forward differs from its first; None for other errors."""
    known = any(words in str(error) for words in REPEATED)
    if not isinstance(error, CheckpointError) and not known:
        return None
    first = " ".join(str(error).split("\n")[0].split())
    unit = f"the forward of {_Stateless.latest}" if _Stateless.latest else "a unit's forward"
    return ConfigError(
        f"{unit} computes something else when backward repeats it ({first[:160]}): it changes its own state "
        "or reads one that changes.",
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
        contexts = functools.partial(_contexts, keep.__contains__)
        return checkpoint(self._forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(keep: Callable[[Key], bool]) -> Any:
    """Built for each forward, so that its calls are counted from the first."""
    counts: tuple[Counter[Any], Counter[Any]] = (Counter(), Counter())

    def policy(context: Any, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
        count = counts[bool(context.is_recompute)]
        count[op] += 1
        return CheckpointPolicy.MUST_SAVE if keep((op, count[op] - 1)) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def measure(block: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Measured:
    """One forward without side effects: random streams and buffers are restored."""
    own = {storage_of(t) for t in [*block.parameters(), *block.buffers()]}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if storage_of(tensor) not in own:
            saved[storage_of(tensor)] = tensor.untyped_storage().nbytes()
        # The tensor itself would be a cycle through its graph that no collection finds: the model would stay.
        return tensor.detach()

    inputs = {
        storage_of(t): t.untyped_storage().nbytes()
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
    devices = {p.device.index for p in block.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):  # by default it reads the generators of all GPUs
        yield
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


class _Recorder(TorchDispatchMode):
    """Every operation with its outputs, counted as selective checkpointing counts them."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[Any] = Counter()
        self._written: list[Tensor] = []
        self._made: list[tuple[Key, list[Tensor], list[int], set[int], float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._written += written_by(func, args, kwargs)
        if func in SAC_IGNORED_OPS:
            return out
        key = (func, self._counts[func])
        self._counts[func] += 1
        tensors = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        taken = {storage_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        # Held until the end: the address of a freed storage may be another's later.
        self._made.append(
            (key, tensors, [writes(t) for t in tensors], taken, _flops(func, args, kwargs, out))
        )
        return out

    def produced(self, known: set[int]) -> list[Produced]:
        """Outputs with memory of their own that are not written afterwards: a kept value must be
        unchanged.
        """
        found, written = [], {storage_of(t) for t in self._written}
        for key, tensors, versions, taken, flops in self._made:
            storages = {storage_of(t): t.untyped_storage().nbytes() for t in tensors}
            changed = any(writes(t) != version for t, version in zip(tensors, versions, strict=True))
            changed = changed or bool(storages.keys() & written)
            if storages and not changed and not storages.keys() & (taken | known) and sum(storages.values()):
                found.append(Produced(key, sum(storages.values()), flops))
        return found


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Operations as torch counts them; for others one an element."""
    count = flop_registry.get(func.overloadpacket)
    if count is not None:
        return float(count(*args, **(kwargs or {}), out_val=out))
    return float(sum(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)))
