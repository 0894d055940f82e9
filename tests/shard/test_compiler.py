"""Whether units are compiled, by the flag, the device, and what torch's compiler needs on a GPU."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp.base.errors import ConfigError
from fsdp.config import SpeedSection
from fsdp.shard import compute as compiler

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


def test_kernels_lie_on_the_nodes_disk_where_the_environment_does_not_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both: with torch's variable set by the user Triton still wrote to the home, which had none."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for torchs, tritons in ((None, None), ("mine", None), (None, "its"), ("mine", "its")):
        for name, value in zip(compiler.FOLDERS, (torchs, tritons), strict=True):
            monkeypatch.setenv(name, value or "")
        compiler.set_kernel_folders()
        own = f"{tmp_path}/shardrun-compile-{os.getuid()}"
        assert os.environ[compiler.FOLDERS[0]] == (torchs or own)
        assert os.environ[compiler.FOLDERS[1]] == (
            tritons or f"{Path(torchs).absolute() if torchs else own}/triton"
        )
    assert Path(own).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("taken", ["others write", "a link", "a file"])
def test_a_folder_that_others_could_fill_is_refused(
    taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / f"shardrun-compile-{os.getuid()}"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(compiler.FOLDERS[0], "")
    if taken == "others write":
        own.mkdir()
        own.chmod(0o777)
    elif taken == "a link":
        own.symlink_to("/tmp")
    else:
        own.touch()
    with pytest.raises(ConfigError, match=rf"HINT: export {compiler.FOLDERS[0]}="):
        compiler.set_kernel_folders()
