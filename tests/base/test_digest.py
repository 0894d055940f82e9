"""The digest of a tensor: of any sharding the same, and read from its device once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp.base.devices import CHUNK, combine, digest_shard, same_values


class Reads(TorchDispatchMode):
    """Operations by which a host reads a number of a device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reading = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        self.count += func in reading
        return func(*args, **(kwargs or {}))


def test_a_device_is_read_once_a_tensor_whatever_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    plain = Tensor.tolist

    def noted(self: Tensor) -> Any:
        copies.append(self.numel())
        return plain(self)

    monkeypatch.setattr(Tensor, "tolist", noted)
    with Reads() as reads:
        digest_shard(torch.ones(3 * CHUNK + 1))
    assert (reads.count, copies) == (0, [2])


@pytest.mark.parametrize("cuts", [(1,), (CHUNK,), (5, CHUNK + 2, 2 * CHUNK)])
def test_shards_have_the_digest_of_the_whole(cuts: tuple[int, ...]) -> None:
    whole = torch.randn(2 * CHUNK + 9, generator=torch.Generator().manual_seed(0))
    edges = (0, *cuts, whole.numel())
    parts = [digest_shard(whole[a:b]).at(a) for a, b in itertools.pairwise(edges)]
    assert combine(parts) == combine([digest_shard(whole).at(0)])
    moved = whole.roll(1)
    assert combine([digest_shard(moved).at(0)]) != combine(parts)


NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), True),
        (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0]), False),
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), True),
        (torch.tensor(NAN), torch.tensor(NAN), True),
        (torch.zeros(2, 3), torch.zeros(3, 2), False),
        (torch.ones(2), torch.ones(2, dtype=torch.bfloat16), True),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2).to(torch.float8_e4m3fn), True),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.zeros(2).to(torch.float8_e4m3fn), False),
    ],
)
def test_two_tensors_are_the_same_by_value_and_nan_by_its_bits(
    one: Tensor, other: Tensor, same: bool
) -> None:
    assert same_values(one, other) is same
