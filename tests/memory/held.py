"""Bytes that a forward keeps alive for its backward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Storages(TorchDispatchMode):
    """Weak references to every storage that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.seen[storage._cdata] = weakref.ref(storage)
        return out


def held(module: nn.Module, forward: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Bytes of live storages after the forward, without parameters; and the output, which owns them."""
    own = {t.untyped_storage()._cdata for t in [*module.parameters(), *module.buffers()]}
    storages = _Storages()
    with storages:
        output = forward()
    gc.collect()
    alive = {cdata: ref() for cdata, ref in storages.seen.items() if cdata not in own}
    return sum(storage.nbytes() for storage in alive.values() if storage is not None), output


def gradients(module: nn.Module, output: Tensor) -> list[Tensor]:
    output.square().sum().backward()
    found = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return found


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, -1)).movedim((-2, -3), (1, 0))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norms[1](x)))))


class Trunk(nn.Module):
    """Blocks only, so that all memory is theirs."""

    def __init__(self, dropout: float = 0.0, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x
