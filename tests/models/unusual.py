"""Models, data and hooks that a person may bring, which torch alone answers with a traceback."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.user_code import Block, Sentences, TiedWords, Uneven, Vectors

# ---------------------------------------------------------------- what trains


class Empty(Uneven):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0))
        self.blocks[0].nothing = nn.Parameter(torch.zeros(0, 3))


class Transposed(Uneven):
    """Two weights whose memory is in the order of their columns, in the root and in a block; `plain` copies
    them.
    """

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        layers = (self.stem, self.get_submodule("blocks.1.up"))
        for layer in layers:
            assert isinstance(layer, nn.Linear)
            rows, columns = layer.weight.shape
            turned = torch.linspace(-0.2, 0.2, rows * columns).view(columns, rows).t()
            layer.weight = nn.Parameter(turned.contiguous() if plain else turned)


class Orthogonal(Uneven):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.orthogonal(self.get_submodule("blocks.0.up"))


class Unused(Uneven):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(4, 4)


# ---------------------------------------------------------------- what is refused


class Complex(Uneven):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(13, dtype=torch.complex64))


class Lazy(Uneven):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.LazyLinear(13)


class PerSample(Uneven):
    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        logits = super().forward(x)
        loss = None if targets is None else nn.functional.cross_entropy(logits, targets, reduction="none")
        return {"loss": loss, "logits": logits}


class Packed(Tensor):
    """A weight as a library of quantized tensors has it: operations of its own, no other."""

    @staticmethod
    def __new__(cls: type[Packed], values: Tensor) -> Packed:
        made: Packed = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} is not supported")


class Quantized(Uneven):
    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(Packed(torch.zeros(13, 4)), requires_grad=False)


class Counts(Block):
    """A block that counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__(13)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Counting(Uneven):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counts() for _ in range(2))


class Alternates(Block):
    """A block that is applied twice or once, in turn."""

    def __init__(self) -> None:
        super().__init__(13)
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return super().forward(super().forward(x) if len(self.calls) % 2 else x)


class Alternating(Uneven):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Alternates() for _ in range(2))


class Numbered(Block):
    """A block that counts its calls in a number."""

    def __init__(self) -> None:
        super().__init__(13)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Numbering(Uneven):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Numbered() for _ in range(2))


class Cache:
    """A key-value cache as transformers' have it: what the blocks append to."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Tensor]] = []

    def get_seq_length(self) -> int:
        return len(self.layers)


class Caches(Block):
    def __init__(self) -> None:
        super().__init__(13)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        out = super().forward(x)
        if cache is not None:
            cache.layers.append({"keys": out})
        return out


class Caching(Uneven):
    """A model that makes a cache in each forward, though it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Caches() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, cache = self.stem(x), Cache()
        for block in self.blocks:
            x = block(x, cache=cache)
        return self.head(x)


class Words(nn.Module):
    def __init__(self, words: int = 31, positions: int = 9) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, 13), nn.Embedding(positions, 13)
        self.blocks = nn.ModuleList(Block(13) for _ in range(2))
        self.head = nn.Linear(13, 31)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class FloatTargets(Vectors):
    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], float(self.targets[index])


class ManyClasses(Vectors):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index], int(self.targets[index]) + 5


def float_targets() -> FloatTargets:
    return FloatTargets(50)


def many_classes() -> ManyClasses:
    return ManyClasses(50)


def sentences() -> Sentences:
    return Sentences(50)


def without_default(output: Tensor, input: Tensor, group: Any, op: Any, async_op: bool) -> Any:
    return dist.reduce_scatter_tensor(output, input, op=op, group=group, async_op=async_op)


class TiedWithMask(TiedWords):
    """Its mask is no buffer, so that it cannot be built on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(9)


class Dropping(Uneven):
    """Drops half of the stem's output in training."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(12, 13), nn.Dropout())  # type: ignore[assignment]


def part_in_eval_mode() -> Dropping:
    model = Dropping()
    model.stem.eval()
    return model


def all_in_eval_mode() -> Dropping:
    return Dropping().eval()
