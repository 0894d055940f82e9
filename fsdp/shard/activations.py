"""Activation checkpointing: a unit keeps nothing from forward to backward, or the results of matrix products
and attention (`ops`); or, compiled, what the compiler keeps within a budget.

A unit's forward is replaced on the instance: no wrapper, so no name changes. A compiled unit is one graph,
with the recomputation in its backward; where that graph would break, the unit stays eager. An eager one's
first forward in training is checked: backward would repeat what it writes into its own state, and would write
into a kept product a second time, which torch does not see (`torch.matmul` returns a batched product as a
view with a version counter of its own). Not here: where kept activations are stored (offload.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fsdp.base.errors import ConfigError
from fsdp.base.torch_private import (
    TorchDispatchMode,
    product_operators,
    schema,
    set_compiler_activation_budget,
    tree_leaves,
    writes,
)
from fsdp.config import MemorySection
from fsdp.models.units import WRAP_HINT, blocks_of


@functools.cache
def _products() -> frozenset[Any]:
    """Operators whose results `ops` keeps. Not a constant: torch's varlen loads the compiler."""
    aten: Any = torch.ops.aten
    matrices = (aten.mm.default, aten.addmm.default, aten.bmm.default)
    return product_operators().union(matrices)


def apply_activation_checkpointing(
    units: Sequence[list[nn.Module]], memory: MemorySection, *, compiled: bool = False
) -> None:
    """Applied before the units are compiled and sharded."""
    budget, kind = memory.activation_budget, memory.activation_checkpointing
    if budget < 1:
        if not compiled:
            raise ConfigError(
                f"--memory.activation_budget {budget:g} is the compiler's, and units are not compiled.",
                "--speed.compile true, or --memory.activation_checkpointing ops",
            )
        set_compiler_activation_budget(budget)
    if kind == "none":
        return
    blocks = blocks_of(units)
    if not blocks:
        fault = f"--memory.activation_checkpointing {kind} works on units, and this model has none."
        raise ConfigError(fault, WRAP_HINT)
    for block in blocks[:: memory.activation_checkpointing_every]:
        block.forward = Recomputed(block, keeps_products=kind == "ops")  # type: ignore[method-assign]


def _keep_products(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _products() else CheckpointPolicy.PREFER_RECOMPUTE


class Recomputed:
    """A unit's forward, which backward calls again. Its first call in training is refused if backward would
    change a tensor a second time; compiled code is not checked.
    """

    def __init__(self, block: nn.Module, *, keeps_products: bool) -> None:
        self.forward = block.forward
        self._block, self._keeps_products = block, keeps_products
        self._more: dict[str, Any] = {}
        if keeps_products:
            self._more["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_products)
        self._class_name = type(block).__name__  # sharding gives it another
        self._is_checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A call, not a partial of torch's function: the compiler skips what begins in torch.utils.checkpoint.
        return checkpoint(self._checked, *args, use_reentrant=False, **self._more, **kwargs)

    def _checked(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self._is_checked or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        self._is_checked = True
        state = [(name, buffer, writes(buffer)) for name, buffer in self._block.named_buffers()]
        if self._keeps_products:
            with _ProductWrites() as products:
                out = self.forward(*args, **kwargs)
            changed = products.written
        else:
            out, changed = self.forward(*args, **kwargs), ""
        changed = changed or next((name for name, buffer, count in state if writes(buffer) != count), "")
        if changed:
            raise ConfigError(
                f"the forward of a {self._class_name} changes {changed} in place, and backward "
                "would change it a second time.",
                "--memory.activation_checkpointing none, or full for a product",
            )
        return out


class _ProductWrites(TorchDispatchMode):
    """Finds an operation that writes into the result of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.written = ""
        self._kept: dict[int, Tensor] = {}
        """Held until the end: the address of a freed storage may be another's later."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for at, argument in enumerate(schema(func).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[at] if at < len(args) else (kwargs or {}).get(argument.name)
                if any(_storage(leaf) in self._kept for leaf in tree_leaves(value)):
                    self.written = "the result of a product"
        out = func(*args, **(kwargs or {}))
        if func in _products():
            self._kept |= {_storage(leaf): leaf for leaf in tree_leaves(out)}
        return out


def _storage(value: Any) -> int:
    return id(value.untyped_storage()) if isinstance(value, Tensor) else 0
