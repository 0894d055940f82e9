"""Streams: the same bits however cut, on any processor; and the numbers are what their names say."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import zlib

import pytest
import torch

from fsdp.models import init
from fsdp.models.init import BLOCK, Constant, Init, Normal, Uniform, draw

NAME = "blocks.0.attention.q.weight"
LENGTH = 3 * BLOCK + 777


@pytest.mark.parametrize("kind", [Normal(0.02), Normal(1.0), Uniform(0.5), Constant(1.5)])
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_same_bits_however_cut(kind: Init, parts: int) -> None:
    whole = draw(kind, 3, NAME, 0, LENGTH)
    edges = [round(i * LENGTH / parts) | 1 for i in range(parts)]
    edges = [0, *edges[1:], LENGTH]
    pieces = [draw(kind, 3, NAME, low, high - low) for low, high in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(pieces), whole)


CHECKSUM = 0x44B5B5CF
SCRIPT = f"""
import zlib
from fsdp.models.init import Normal, draw
print(zlib.crc32(draw(Normal(0.02), 7, {NAME!r}, 12345, 100_001).numpy().tobytes()))
"""


def test_bits_are_the_ones_of_every_other_machine_and_version() -> None:
    assert zlib.crc32(draw(Normal(0.02), 7, NAME, 12345, 100_001).numpy().tobytes()) == CHECKSUM


@pytest.mark.long
@pytest.mark.slow
def test_bits_do_not_depend_on_the_vector_instructions() -> None:
    env = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
    assert int(done.stdout) == CHECKSUM, done.stderr


@pytest.mark.parametrize("kind", [Normal(0.5), Uniform(0.1)], ids=str)
@pytest.mark.parametrize(("start", "numel"), [(0, BLOCK), (5, 10), (BLOCK - 3, 2 * BLOCK + 9)])
def test_words_drawn_on_a_device_are_the_hosts(kind: Normal | Uniform, start: int, numel: int) -> None:
    key = init.name_seed(7, NAME, 16)
    values = init._fill(torch.empty(numel), kind, key, start, init._device_words, 2)
    assert torch.equal(values, draw(kind, 7, NAME, start, numel))


def test_a_device_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert init.draws_as_the_host.__wrapped__(device)
    right = init._product
    monkeypatch.setattr(init, "_product", lambda a, m: tuple(part ^ 1 for part in right(a, m)))
    assert not init.draws_as_the_host.__wrapped__(device)
