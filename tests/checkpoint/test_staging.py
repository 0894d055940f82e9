"""The pinned memory of a save on CUDA, with a stand-in for CUDA's runtime."""

from __future__ import annotations

import contextlib
import gc
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp.checkpoint.staging import Staging


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The addresses that the stand-in has pinned; it refuses one that is pinned, as CUDA does."""
    held: set[int] = set()

    def register(address: int, size: int, flags: int) -> int:
        assert address not in held, "already registered"
        held.add(address)
        return 0

    def unregister(address: int) -> int:
        held.remove(address)
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "Stream", mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return held


def copied(staging: Staging, size: int) -> None:
    value: Any = torch.arange(size, dtype=torch.float32)
    piece, part = SimpleNamespace(local=value), SimpleNamespace(index=0, first=0, last=size)
    staging.copy([piece], [part], None)  # type: ignore[list-item]


def test_a_larger_buffer_and_the_end_of_a_run_release_what_was_pinned(pinned: set[int]) -> None:
    """As in a notebook that trains twice: memory that is unmapped while pinned stays with CUDA."""
    for _ in range(3):
        staging = Staging(torch.device("cuda", 0))
        copied(staging, 10)
        first = set(pinned)
        copied(staging, 10)
        assert pinned == first
        copied(staging, 1 << 20)
        assert len(pinned) == 1
        del staging
        gc.collect()
        assert not pinned
