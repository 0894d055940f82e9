"""A torchvision that cannot load its extension is imported all the same; one that can is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PREPARE = """
import sys, torch
import pytest

from fsdp.base.torch_private import prepare_torchvision
first, second = prepare_torchvision(), prepare_torchvision()
print(first is second, hasattr(torch.ops.torchvision, "nms"), "torchvision" in sys.modules)
"""


def run(script: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), str(Path.cwd())])}
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)


def fake_torchvision(folder: Path) -> Path:
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("")
    return package


@pytest.mark.long
@pytest.mark.slow
def test_schemas_are_declared_where_the_extension_cannot_load(tmp_path: Path) -> None:
    (fake_torchvision(tmp_path) / "_C.so").write_bytes(b"not a library")
    assert run(PREPARE, tmp_path).stdout.split() == ["True", "True", "False"]
