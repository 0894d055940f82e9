"""Initial values drawn by operations of a device have the bits of those drawn on the host."""

from __future__ import annotations

import pytest
import torch

from fsdp.models import init
from fsdp.models.init import BLOCK, Init, Normal, Uniform, draw

INITS: list[Normal | Uniform] = [Normal(0.02), Normal(0.5, clip=1.0), Uniform(0.1)]


@pytest.mark.parametrize("kind", INITS, ids=str)
@pytest.mark.parametrize(("start", "numel"), [(0, BLOCK), (5, 10), (BLOCK - 3, 2 * BLOCK + 9)])
def test_the_bits_are_the_hosts(kind: Normal | Uniform, start: int, numel: int) -> None:
    values = init.fill_on_device(torch.empty(numel), kind, 7, "blocks.0.weight", start)
    assert torch.equal(values, draw(kind, 7, "blocks.0.weight", start, numel))


def test_a_device_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    init.draws_as_the_host.cache_clear()
    assert init.draws_as_the_host(device)
    init.draws_as_the_host.cache_clear()
    right = init._device_minus_log
    monkeypatch.setattr(init, "_device_minus_log", lambda words: right(words).mul_(1 + 2**-23))
    assert not init.draws_as_the_host(device)
    init.draws_as_the_host.cache_clear()


def test_constants_and_host_tensors_are_filled_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "fill_on_device", lambda *arguments: pytest.fail("not a CUDA device"))
    kinds: list[Init] = [init.Constant(2.0), Normal(0.02)]
    for kind in kinds:
        assert torch.equal(init.draw_into(torch.empty(5), kind, 0, "w"), draw(kind, 0, "w", 0, 5))
