"""Activation checkpointing: a unit keeps nothing from forward to backward, all, all but some operations, or a
budget.

A unit's forward is replaced on the instance: no wrapper, so no name changes. Where units are compiled the
compiler keeps the budget; elsewhere the first forward in training runs twice, once to measure the unit's
operations, and those worth most computation a byte are kept until the budget is spent. `ops` keeps the
results of matrix products and attention. A result that a later operation writes into is computed again:
backward would write into what is kept a second time, and the version counter does not show all writes
(`torch.matmul` returns a batched product as a view that has a counter of its own). Not here: where kept
activations are stored (offload.py).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from fsdp.base.torch_private import (
    FakeTensor,
    TorchDispatchMode,
    product_operators,
    schema,
    set_compiler_activation_budget,
    tree_leaves,
    writes,
)
from fsdp.config import MemorySection
from fsdp.models.units import WRAP_HINT, blocks_of

NO_RECOMPUTATION = "--memory.activation_checkpointing none --memory.activation_budget 1"
REPEATED = (
    "backward but not found in storage",
    "cached during selective activation checkpoint has been mutated",
)
"""Of torch's errors of selective recomputation, which have no class of their own."""

Forward = Callable[..., Any]
Key = tuple[Any, int]
"""An operation and the index of its call in a forward."""


@functools.cache
def _products() -> frozenset[Any]:
    """Operators whose results `ops` keeps. Not a constant: torch's varlen loads the compiler."""
    aten: Any = torch.ops.aten
    matrices = (aten.mm.default, aten.addmm.default, aten.bmm.default)
    return product_operators().union(matrices)


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
        raise ConfigError(f"--memory.{flag} works on units, and this model has none.", WRAP_HINT)
    if compiled and budget < 1:
        set_compiler_activation_budget(budget)
        return
    names = {module: name for name, module in root.named_modules()} if root is not None else {}
    for block in blocks[:: memory.activation_checkpointing_every]:
        forward = _Stateless(block, names.get(block, ""), flag)
        block.forward = (  # type: ignore[method-assign]
            functools.partial(checkpoint, forward, use_reentrant=False)
            if kind == "full" and budget == 1
            else Selective(block, forward, budget if budget < 1 else None)
        )


class _Stateless:
    """A unit's forward. Its first call in training is refused if it changes a tensor of the unit in place:
    backward would change it a second time. Compiled code and the planner's fake tensors are not checked.
    """

    latest = ""
    """The unit of the last forward: in backward, the one that is repeated."""

    def __init__(self, block: nn.Module, name: str, flag: str) -> None:
        self._block, self._forward, self._flag = block, block.forward, flag
        self._name = name or type(block).__name__
        self._checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        _Stateless.latest = self._name
        if self._checked or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        self._checked = True
        before = [(name, tensor, writes(tensor)) for name, tensor in self._tensors()]
        out = self._forward(*args, **kwargs)
        if changed := [name for name, tensor, count in before if writes(tensor) != count]:
            raise ConfigError(
                f"--memory.{self._flag}: the forward of {self._name} changes its own state, {changed[0]}, "
                "and backward would change it a second time.",
                NO_RECOMPUTATION,
            )
        return out

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, module in self._block.named_modules(prefix=self._name):
            buffers = module.named_buffers(recurse=False, remove_duplicate=False)
            for key, value in (*buffers, *vars(module).items()):
                if (
                    isinstance(value, Tensor)
                    and not isinstance(value, FakeTensor)
                    and not value.is_inference()
                ):
                    yield f"{prefix}.{key}", value


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


# ---------------------------------------------------------------- some operations are kept


class Selective:
    """A unit's forward that keeps the results of some operations."""

    def __init__(self, block: nn.Module, forward: Forward, budget: float | None) -> None:
        self._block, self._forward, self._budget = block, forward, budget
        self.measured = False
        self.keep: frozenset[Key] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # with `ops` alone: the compiler keeps a budget by itself
            contexts = functools.partial(create_selective_checkpoint_contexts, _keep_products)
            return checkpoint(self._forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if not self.measured:
            self.keep = choose(self._block, self._forward, self._budget, args, kwargs)
            self.measured = True
        if self.keep is None:
            return self._forward(*args, **kwargs)
        if not self.keep:
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        contexts = functools.partial(_contexts, self.keep)
        return checkpoint(self._forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _keep_products(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _products() else CheckpointPolicy.PREFER_RECOMPUTE


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


def storage_of(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())


def choose(
    block: nn.Module, forward: Forward, budget: float | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> frozenset[Key] | None:
    """The operations that are kept besides the inputs, from which recomputation starts; None recomputes
    nothing. Without a budget the products, else within `budget` of what the unit keeps by itself: those of
    most computation a byte. By one forward without side effects: random streams and buffers are restored.
    """
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
        if isinstance(t, Tensor) and storage_of(t) not in own
    }
    recorder = _Recorder()
    with _unwritten(block), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), recorder:
        forward(*args, **kwargs)
    produced = recorder.produced(set(inputs) | own)
    if budget is None:
        return frozenset(key for key, _, _ in produced if key[0] in _products())
    by_itself, spent = sum({**saved, **inputs}.values()), sum(inputs.values())
    keep = set()
    for key, nbytes, _ in sorted(produced, key=lambda made: -made[2] / made[1]):
        if spent + nbytes <= budget * by_itself:
            spent += nbytes
            keep.add(key)
    return frozenset(keep) if spent < by_itself else None


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
        self._written += _written_by(func, args, kwargs)
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

    def produced(self, known: set[int]) -> list[tuple[Key, int, float]]:
        """Outputs with memory of their own that are not written afterwards (a kept value must be unchanged):
        their bytes, and the operations that repeat them.
        """
        made, written = [], {storage_of(t) for t in self._written}
        for key, tensors, versions, taken, flops in self._made:
            storages = {storage_of(t): t.untyped_storage().nbytes() for t in tensors}
            changed = any(writes(t) != version for t, version in zip(tensors, versions, strict=True))
            changed = changed or bool(storages.keys() & written)
            if storages and not changed and not storages.keys() & (taken | known) and sum(storages.values()):
                made.append((key, sum(storages.values()), flops))
        return made


def _written_by(operator: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operator writes into."""
    values = [
        args[at] if at < len(args) else (kwargs or {}).get(argument.name)
        for at, argument in enumerate(schema(operator).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Operations as torch counts them; for others one an element."""
    count = flop_registry.get(func.overloadpacket)
    if count is not None:
        return float(count(*args, **(kwargs or {}), out_val=out))
    return float(sum(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)))
