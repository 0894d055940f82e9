"""Initial values by torch's operations are those that numpy draws on the host, to the bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp.models import device_draw
from fsdp.models.init import BLOCK, Init, Normal, Uniform, draw

INITS = (Normal(0.02), Normal(1.5, clip=2.0), Uniform(0.3))


@pytest.mark.parametrize("init", INITS, ids=str)
@pytest.mark.parametrize(
    ("start", "numel"), [(0, 5), (0, BLOCK), (BLOCK - 3, 7), (3 * BLOCK + 1, 2 * BLOCK), (2**40, 9), (7, 0)]
)
def test_the_bits_are_the_hosts(init: Normal | Uniform, start: int, numel: int) -> None:
    found = device_draw.fill(torch.empty(numel), init, 7, "blocks.0.weight", start)
    assert torch.equal(found, draw(init, 7, "blocks.0.weight", start, numel))


def test_several_pieces_and_other_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_draw, "BLOCKS", 2)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        found = device_draw.fill(torch.empty(5, BLOCK, dtype=dtype), INITS[0], 1, "w", 11)
        assert torch.equal(found.view(-1), draw(INITS[0], 1, "w", 11, 5 * BLOCK, dtype))


def test_the_host_draws_where_a_devices_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    device_draw.draws_as_the_host.cache_clear()
    assert device_draw.draws_as_the_host(device)
    device_draw.draws_as_the_host.cache_clear()
    wrong = device_draw._minus_log
    monkeypatch.setattr(device_draw, "_minus_log", lambda words: wrong(words).mul_(1 + 2**-23))
    assert not device_draw.draws_as_the_host(device)
    device_draw.draws_as_the_host.cache_clear()


def test_a_tensor_on_the_host_is_drawn_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(device_draw, "fill", fail)
    init: Init = INITS[0]
    assert torch.equal(device_draw.draw_into(torch.empty(5), init, 0, "w"), draw(init, 0, "w", 0, 5))


def test_a_tensor_on_a_gpu_is_drawn_there_if_its_bits_are_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor is a stand-in."""
    there: Any = SimpleNamespace(device=torch.device("cuda", 1))
    monkeypatch.setattr(device_draw, "fill", lambda *given: "the device")
    monkeypatch.setattr(device_draw.host, "draw_into", lambda *given: "the host")
    for equal, drawn in ((True, "the device"), (False, "the host")):
        monkeypatch.setattr(device_draw, "draws_as_the_host", lambda device, equal=equal: equal)
        assert device_draw.draw_into(there, INITS[0], 0, "w") == drawn
