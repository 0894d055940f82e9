"""Which modules become units, for models of many shapes; and that FSDP takes every choice and computes the
same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.models.transformer import Transformer, TransformerSizes
from fsdp.models.units import find_units


class Layer(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Net(nn.Module):
    """A stem, a body given from outside, a head."""

    def __init__(self, body: nn.Module, width: int = 4) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(width, width), body, nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for part in self.body if isinstance(self.body, nn.ModuleList) else [self.body]:
            x = part(x)
        return self.head(x)


class Ours(Net):
    """A model with units() of its own, whatever it is given to return."""

    chosen: Any

    def units(self) -> Any:
        return self.chosen()


def small(**changes: Any) -> Transformer:
    sizes = {"vocab_size": 32, "layers": 2, "heads": 2, **changes}
    return Transformer(TransformerSizes(width=16, max_seq_len=8, **sizes))


def names(model: nn.Module, wrap: str = "auto") -> list[list[str]]:
    known = {module: name for name, module in model.named_modules()}
    return [[known[module] for module in unit] for unit in find_units(model, wrap)]


def stack() -> nn.Module:
    return nn.Sequential(Layer(), Layer())


def flat(model: nn.Module, wrap: str = "auto") -> list[str]:
    return [name for unit in names(model, wrap) for name in unit]


# ---------------------------------------------------------------- auto


def test_experts_in_a_list_are_no_units() -> None:
    """A rank calls those alone that its rows select, and would gather alone."""
    experts = nn.ModuleList(Layer() for _ in range(3))
    assert names(Net(nn.ModuleDict({"experts": experts}))) == []
    assert names(Net(nn.ModuleDict({"layers": experts}))) == [[f"body.layers.{at}"] for at in range(3)]


def test_the_models_own_units_come_first() -> None:
    large = small(vocab_size=1 << 16)
    assert names(large) == [["embedding"], ["blocks.0"], ["blocks.1"], ["norm", "head"]]
    assert names(small(vocab_size=1 << 16, tied=True)) == [["blocks.0"], ["blocks.1"]]
    # an embedding of 512 numbers needs no collective of its own
    assert names(small()) == [["blocks.0"], ["blocks.1"]]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (nn.ModuleList([Layer(), Layer(), Layer()]), ["body.0", "body.1", "body.2"]),
        (nn.Sequential(Layer(), nn.ReLU(), Layer()), ["body.0", "body.2"]),
        (nn.ModuleList([Layer()]), []),
        (nn.ModuleDict({"a": Layer(), "b": Layer()}), ["body.a", "body.b"]),
        (nn.Sequential(stack(), stack()), ["body.0.0", "body.0.1", "body.1.0", "body.1.1"]),
        (Net(nn.ModuleList([Net(stack()), Net(stack())])), ["body.body.0", "body.body.1"]),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), []),
        (
            nn.Sequential(nn.Linear(4, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 1024)),
            ["body.2", "body.3"],
        ),
        (
            nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(2)]),
            ["body.0", "body.1"],
        ),
        (nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)]), []),
        (nn.ModuleList([nn.Dropout(), nn.Dropout()]), []),
        (nn.ParameterList([torch.zeros(1 << 20) for _ in range(3)]), []),
    ],
    ids=[
        "list", "between-activations", "only-one", "dict", "stages", "nested", "mlp", "large-layers",
        "large-layer-and-relu", "small-layer-and-relu", "no-parameters", "parameter-list",
    ],
)  # fmt: skip
def test_repeated_blocks_are_found(body: nn.Module, expected: list[str]) -> None:
    assert flat(Net(body)) == expected


# ---------------------------------------------------------------- parameters in two places


def test_tied_units_go_to_the_root() -> None:
    model: Any = Ours(nn.ModuleList([Layer(), Layer(), Layer()]))
    model.chosen = lambda: [model.stem, *model.body]
    model.stem.weight = model.body[1].linear.weight
    assert flat(model) == ["body.0", "body.2"]


# ---------------------------------------------------------------- class, size, root


# ---------------------------------------------------------------- what a person gets wrong


@pytest.mark.parametrize(
    ("wrap", "says", "hint"),
    [
        ("class:Blok", "no such class with parameters, only Embedding, Block, RMSNorm", "--mesh.wrap auto"),
        ("class:Block,Dropout", "--mesh.wrap class:Dropout", "--mesh.wrap auto"),
    ],
)  # fmt: skip
def test_a_wrong_wrap_is_one_line_with_a_hint(wrap: str, says: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_units(small(dropout=0.1), wrap)
    assert says in str(error.value)
    assert error.value.hint == hint


# ---------------------------------------------------------------- FSDP takes each choice
