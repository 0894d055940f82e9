"""Each setting keeps what it names for backward, and gradients stay equal."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp.base.errors import ConfigError
from fsdp.config import MemorySection
from fsdp.models.units import find_units
from fsdp.shard.activations import apply_activation_checkpointing
from tests.memory.held import Trunk, gradients, held

INPUT = torch.linspace(-1, 1, 2 * 64 * 32).view(2, 64, 32)


def after(memory: MemorySection) -> tuple[int, list[Tensor]]:
    """Bytes held between forward and backward, and the gradients."""
    model = Trunk()
    apply_activation_checkpointing(find_units(model), memory)
    torch.manual_seed(5)
    nbytes, output = held(model, lambda: model(INPUT))
    return nbytes, gradients(model, output)


def test_each_kind_keeps_less_and_computes_the_same() -> None:
    none, expected = after(MemorySection())
    full, one = after(MemorySection(activation_checkpointing="full"))
    second, two = after(MemorySection(activation_checkpointing="full", activation_checkpointing_every=2))
    ops, three = after(MemorySection(activation_checkpointing="ops"))
    assert full < ops < none
    assert full < second < none
    for found in (one, two, three):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_compiler_keeps_the_budget() -> None:
    functorch: Any = torch._functorch.config
    before = functorch.activation_memory_budget
    try:
        model = Trunk()
        apply_activation_checkpointing(find_units(model), MemorySection(activation_budget=0.3), compiled=True)
        assert functorch.activation_memory_budget == 0.3
        assert "forward" not in vars(next(iter(model.blocks)))
    finally:
        functorch.activation_memory_budget = before


def compiled(kind: Any, *, around: bool = False) -> tuple[int, int, list[Tensor]]:
    """Graphs, bytes kept without parameters, and gradients, with the compiler's choice
    of what is kept, without generated code. `around`: torch's checkpoint around the compiled forward.
    """
    torch.compiler.reset()
    model, graphs, kept = Trunk(dropout=0.1), list[Any](), dict[int, int]()
    apply_activation_checkpointing(find_units(model), MemorySection(activation_checkpointing=kind))
    lower = torch._dynamo.lookup_backend("aot_eager_decomp_partition")

    def backend(*about: Any) -> Any:
        graphs.append(about)
        return lower(*about)

    for block in model.blocks:
        block.compile(backend=backend)
        if around:
            block.forward = partial(
                checkpoint, torch.compile(block.forward, backend=lower), use_reentrant=False
            )

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def step() -> list[Tensor]:
        torch.manual_seed(5)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(INPUT)
        for parameter in model.parameters():
            kept.pop(parameter.data_ptr(), None)
        return gradients(model, output)

    step()
    kept.clear()
    found = step()
    torch.compiler.reset()
    return len(graphs), sum(kept.values()), found


@pytest.mark.long
def test_a_compiled_unit_is_recomputed_in_its_graph() -> None:
    """Dynamo left a unit whose forward was torch's checkpoint itself to eager, with no message."""
    none, full, ops = (compiled(kind) for kind in ("none", "full", "ops"))
    assert none[0] == full[0] == ops[0] > 0
    assert full[1] < 0.2 * none[1]
    assert ops[1] <= none[1]
    for found in (full, ops, compiled("none", around=True)):
        assert all(torch.equal(a, b) for a, b in zip(found[2], none[2], strict=True))


class Writes(nn.Module):
    """Into a product, seen by its version; with `batched` into one that is a view with another version."""

    def __init__(self, batched: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.batched = batched

    def forward(self, x: Tensor) -> Tensor:
        product = torch.matmul(x, x.transpose(1, 2)) @ x if self.batched else self.first(x)
        product += x
        return x + self.second(torch.tanh(product))


@pytest.mark.parametrize("batched", [False, True])
def test_a_unit_that_writes_into_a_product(batched: bool) -> None:
    """As transformers' LongT5, Llama 4 and Gemma 3n do: backward would write into what is kept."""

    def computed(kind: Any) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(Writes(batched), Writes(batched))
        apply_activation_checkpointing(find_units(model), MemorySection(activation_checkpointing=kind))
        return gradients(model, model(INPUT / 8))

    assert all(torch.equal(a, b) for a, b in zip(computed("full"), computed("none"), strict=True))
    with pytest.raises(ConfigError, match=r"a Writes changes the result of a product in place.* HINT: "):
        computed("ops")
