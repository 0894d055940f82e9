"""Models, data and hooks that a person may bring, which torch alone answers with a traceback."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.support.user_code import Block, Sentences, Uneven, Vectors

# ---------------------------------------------------------------- what trains


class Shuffled(Uneven):
    """What no state dict holds: an order drawn from Python's stream, and a drawn tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.order = random.sample(range(12), 12)
        self.turn = torch.randn(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x @ self.turn.to(x.dtype))[:, self.order])


class HostNoise(Uneven):
    """Drops features in training, by the streams of Python and numpy, as SpecAugment does."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            kept = np.random.random(12) < 0.5 + random.random() / 2
            x = x * torch.from_numpy(kept).to(x)
        return super().forward(x)


class Unused(Uneven):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(4, 4)


# ---------------------------------------------------------------- what is refused


class GradientHook(Uneven):
    def __init__(self, how: str = "register_hook") -> None:
        super().__init__()
        getattr(self.blocks[0].get_parameter("up.weight"), how)(lambda gradient: None)


class Remembers(Uneven):
    """Computes with parameters that it keeps in a list; with a tensor beside them it is built whole."""

    def __init__(self, beside: bool = False) -> None:
        super().__init__()
        self.decayed = [self.stem.weight, self.head.weight]
        if beside:
            self.shift = torch.zeros(5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.decayed[1].sum()


class Follows(Uneven):
    """A second stem that forward moves after the first, as momentum encoders are moved."""

    def __init__(self, way: str = "in place") -> None:
        super().__init__()
        self.slow, self.way = nn.Linear(12, 13).requires_grad_(False), way

    @torch.no_grad()
    def move(self) -> None:
        for slow, fast in zip(self.slow.parameters(), self.stem.parameters(), strict=True):
            if self.way == "replaced":
                slow.data = slow.data * 0.5 + fast.data * 0.5
            else:
                slow.data.mul_(0.5).add_(fast.data, alpha=0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.move()
        return super().forward(x) + self.head(self.slow(x))


class InStages(Uneven):
    """Its second block is frozen at first, and trained from the second forward on; or the other way round."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.first, self.forwards = first, 0
        self.blocks[1].requires_grad_(first)

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards == 2:
            self.blocks[1].requires_grad_(not self.first)
        return super().forward(x)


class Another(Block):
    """A block with a second method that computes."""

    def __init__(self) -> None:
        super().__init__(13)

    def widened(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


class ByMethod(Uneven):
    """Calls a method of a block that is not its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Another() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) + block.widened(x)  # type: ignore[operator]
        return self.head(x)


class FastWeights(Uneven):
    """Calls its second block with a weight that it computes, as a hypernetwork does; or a layer in each."""

    def __init__(self, inner: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.blocks = nn.ModuleList(Faster(inner) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(x))
        fast = {"up.weight": torch.full((15, 13), 0.1, dtype=x.dtype)}
        x = self.blocks[1](x) if self.inner else torch.func.functional_call(self.blocks[1], fast, (x,))
        return self.head(self.blocks[2](x))


class Faster(Block):
    """A block that calls a layer of its own with another weight."""

    def __init__(self, inner: bool) -> None:
        super().__init__(13)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if not self.inner:
            return super().forward(x)
        fast = {"weight": torch.full((15, 13), 0.1, dtype=x.dtype)}
        y = torch.func.functional_call(self.up, fast, (self.norm(x),))
        return x + self.down(torch.tanh(y))


class Routed(Uneven):
    """One mixture of experts, the only modules in a list; a rank calls those that its rows select."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks
        self.experts = nn.ModuleList(Block(13) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).long()
        x = self.stem(x)
        mixed = torch.zeros_like(x)
        for at in chosen.unique().tolist():
            mixed[chosen == at] = self.experts[at](x[chosen == at])
        return self.head(mixed)


class Detached(Uneven):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class Scales(nn.Module):
    """A block whose output is a view, and whose backward reads its parameter without looking at its size."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.full((13,), 1.5)), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale)[:, :13]


class InPlace(Uneven):
    """Adds to the outputs of its blocks in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scales() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            x += 1.0
        return self.head(x)


class Hidden:
    """A class that torch does not know as a container."""

    def __init__(self, state: Tensor) -> None:
        self.state = state


class Hides(Scales):
    def forward(self, x: Hidden) -> Hidden:  # type: ignore[override]
        return Hidden(x.state * self.scale)


class Hiding(Uneven):
    """Its blocks pass an object on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Hides() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        found = Hidden(self.stem(x))
        for block in self.blocks:
            found = block(found)
        return self.head(found.state)


class Forces(Uneven):
    """Takes a gradient in its forward, as models of forces do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            h = self.stem(x)
            for block in self.blocks:
                h = block(h)
            (found,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
        return self.head(h) + found[:, :5]


class Centres(nn.Module):
    """A loss with parameters, as metric learning has them."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(5, 5))

    def forward(self, output: Tensor, batch: Any) -> Tensor:
        return (output - self.centres[batch["targets"]]).square().sum(-1)


centres = Centres()


class Lazy(Uneven):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.LazyLinear(13)


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


class Words(nn.Module):
    def __init__(self, words: int = 31, positions: int = 9, **more: Any) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, 13, **more), nn.Embedding(positions, 13)
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


class Dictionaries(Dataset[dict[str, Tensor]]):
    """Twelve numbers, or a picture with a class for each pixel; not a pair."""

    def __init__(self, count: int, *sizes: int, classes: int = 0) -> None:
        generator = torch.Generator().manual_seed(8)
        self.columns = {"inputs": torch.randn(count, *sizes, generator=generator)}
        if classes:
            picture = (count, *sizes[1:])
            self.columns["targets"] = torch.randint(0, classes, picture, generator=generator)

    def __len__(self) -> int:
        return len(self.columns["inputs"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.columns.items()}


def numbers(count: int = 50) -> Dictionaries:
    return Dictionaries(count, 12)


def masks(count: int = 50) -> Dictionaries:
    return Dictionaries(count, 3, 5, 5, classes=5)


class Rebuilds(Uneven):
    """Its loss needs no targets."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": (super().forward(x) - x[:, :5]).square().mean()}


class Segments(nn.Module):
    """Logits of (rows, classes, height, width), with as many classes as columns."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.scores = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(torch.tanh(self.widen(x)))
