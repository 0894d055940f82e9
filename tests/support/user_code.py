"""Models and data of a user, as --model.name and --data.name take them; without any import of shardrun."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Vectors(Dataset[tuple[Tensor, int]]):
    """Noise of 12 numbers and a label derived from it."""

    def __init__(self, count: int, spoil: int = -1) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(count, 12, generator=generator)
        self.targets = (self.inputs @ torch.randn(12, 5, generator=generator)).argmax(-1)
        if spoil >= 0:
            self.inputs[spoil] = float("nan")

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index], int(self.targets[index])


def vectors(count: int = 50) -> Vectors:
    """In batches of 12 the epoch ends with two samples: two of four ranks have none."""
    return Vectors(count)


def vectors_with_heldout(count: int = 50, heldout: int = 23) -> tuple[Vectors, Vectors]:
    return Vectors(count), Vectors(heldout)


def spoilt_vectors(count: int = 48, spoil: int = 7) -> Vectors:
    return Vectors(count, spoil)


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Nine tokens with some masked targets, a different number in each sentence."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(6)
        tokens = torch.randint(0, 31, (count, 10), generator=generator)
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:].clone()
        for row in range(count):
            self.targets[row, : row % 8] = -100

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def sentences(count: int = 50) -> Sentences:
    return Sentences(count)


class TaggedSentences(Sentences):
    """A class for each token, by name."""

    classes = tuple(f"tag {n}" for n in range(31))


def tagged_sentences(count: int = 50) -> TaggedSentences:
    return TaggedSentences(count)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width + 2)
        self.down = nn.Linear(width + 2, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Uneven(nn.Module):
    """No protocol, and no width divisible by two, three or four."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.stem = nn.Linear(12, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Wide(Uneven):
    """Widths in multiples of 16, for float8's products."""

    def __init__(self) -> None:
        super().__init__(32)
        for block in self.blocks:
            block.up, block.down = nn.Linear(32, 48), nn.Linear(48, 32)


class Sixteens(Uneven):
    """Rows that every option accepts: multiples of 16 for float8, long enough for moments in 8 bits."""

    def __init__(self) -> None:
        super().__init__(64)
        for block in self.blocks:
            block.up, block.down = nn.Linear(64, 80), nn.Linear(80, 64)


class Frozen(Uneven):
    """Frozen: the stem in the root's group, a part of one block, all of another."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)
        self.blocks[0].get_submodule("up").requires_grad_(False)
        self.blocks[1].requires_grad_(False)


class Scalar(Uneven):
    """Parameters without a dimension, in the root and in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        for block in self.blocks:
            block.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) * block.gain
        return self.head(x) * self.temperature


class Tiny(nn.Module):
    """Every parameter has fewer rows than four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(12, 2)
        self.shift = nn.Parameter(torch.full((1,), 0.1))
        self.scores = nn.Parameter(torch.linspace(-1, 1, 10).view(2, 5))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.narrow(x)) + self.shift) @ self.scores


class TiedWords(nn.Module):
    """No protocol, tied by hand, and the middle block is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(31, 10)
        self.blocks = nn.ModuleList([Block(10), Block(10)])
        self.head = nn.Linear(10, 31, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for at in (0, 1, 1):
            x = self.blocks[at](x)
        return self.head(x)


class OwnLoss(Uneven):
    """Takes the targets and returns its own loss."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = super().forward(x)
        return (
            logits if targets is None else nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)
        )


class Grouped(Uneven):
    """Units as data: two blocks gathered together."""

    def units(self) -> list[object]:
        return [[self.blocks[0], self.blocks[1]], self.blocks[2]]


# ---------------------------------------------------------------- models with something wrong or unusual


class Unfilled(Uneven):
    """One parameter is left uninitialised."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(13))


class ForgetsBuffer(Uneven):
    """init_buffers fills one of its buffers."""

    def __init__(self, kind: str = "float") -> None:
        super().__init__()
        dtype = {"float": torch.float32, "int": torch.int64, "bool": torch.bool, "complex": torch.complex64}[
            kind
        ]
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.register_buffer("forgotten", torch.empty(6, dtype=dtype), persistent=False)

    def init_buffers(self, device: torch.device) -> None:
        self.table = torch.arange(4.0, device=device)


class ForgetsInit(Uneven):
    """param_inits omits one parameter. The registry would refuse the model, so the check is tested alone."""

    def param_inits(self) -> dict[str, object]:
        from fsdp.models.init import Normal

        return {name: Normal(0.1) for name, _ in self.named_parameters() if name != "head.bias"}


class Waves(Uneven):
    """A constant that is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", torch.linspace(0, 1, 7), persistent=False)


class Buffers(Uneven):
    """Every kind of buffer, persistent and not, as the constructor makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(13)
        values = {
            "floats": torch.linspace(0, 1, 7),
            "ints": torch.arange(5),
            "small": torch.tensor(9, dtype=torch.uint8),
            "truth": torch.tensor([True, False, True]),
            "waves": torch.polar(torch.ones(3), torch.arange(3.0)),
            "nothing": torch.zeros(0),
        }
        for name, value in values.items():
            self.register_buffer(f"{name}_kept", value.clone(), persistent=True)
            self.register_buffer(f"{name}_made", value.clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stem(x)))


class PersistentTable(Uneven):
    """A buffer that init_buffers fills and training changes; it is in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4))
        self.register_buffer("made", torch.zeros(2), persistent=False)

    def init_buffers(self, device: torch.device) -> None:
        self.table = torch.zeros(4, device=device)
        self.made = torch.ones(2, device=device)


def uneven_from(state: dict[str, Tensor]) -> nn.Module:
    model = Uneven().double()
    model.load_state_dict(state)
    return model.requires_grad_(False)
