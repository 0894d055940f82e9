"""Whether units are compiled, by the flag, the device, and what torch's compiler needs on a GPU."""

from __future__ import annotations

import importlib.util
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp.config import SpeedSection
from fsdp.parallel import compute as compiler

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class Machine:
    """What is installed on it; all of it at first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._patch, self._header = monkeypatch, folder / "Python.h"
        self._header.touch()
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr(compiler, "_header", lambda: self._header)
        self.has(triton=True, gcc=True, header=True)

    def has(self, *, triton: bool, gcc: bool, header: bool) -> None:
        compiler.missing.cache_clear()
        found: Any = SimpleNamespace() if triton else None
        self._patch.setattr(importlib.util, "find_spec", lambda name: found)
        self._patch.setattr(shutil, "which", lambda name: "/usr/bin/gcc" if gcc and name == "gcc" else None)
        if not header:
            self._header.unlink()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    yield Machine(monkeypatch, tmp_path)
    compiler.missing.cache_clear()


@pytest.mark.parametrize(
    ("flag", "device", "compiles"),
    [
        ("auto", GPU, True),
        ("auto", CPU, False),
        ("true", GPU, True),
        ("true", CPU, True),
        ("false", GPU, False),
        ("false", CPU, False),
    ],
)
def test_auto_is_cuda(flag: Any, device: torch.device, compiles: bool, machine: Machine) -> None:
    assert compiler.compiles(SpeedSection(compile=flag), device) == compiles


@pytest.mark.parametrize(
    ("lacks", "named"),
    [
        ("triton", "the package triton"),
        ("gcc", "a C compiler (gcc, clang, or CC)"),
        ("header", "Python.h (the package python3-dev)"),
    ],
)
def test_the_default_trains_eager_where_triton_cannot_compile(
    lacks: str, named: str, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.has(**{name: name != lacks for name in ("triton", "gcc", "header")})
    with caplog.at_level(logging.WARNING):
        assert not any(compiler.compiles(SpeedSection(), GPU) for _ in range(3))
    assert len(caplog.messages) == 1
    assert named in caplog.messages[0]
    assert "HINT: install it, or --speed.compile false" in caplog.messages[0]
    assert compiler.compiles(SpeedSection(compile="true"), GPU)  # torch's own error says what it needs
