"""A torchvision that cannot load its extension is imported all the same; one that can is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp.base.torch_private import import_torchvision

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


def test_the_installed_torchvision_can_be_imported() -> None:
    assert import_torchvision().models.VisionTransformer


@pytest.mark.slow
def test_schemas_are_declared_where_the_extension_cannot_load(tmp_path: Path) -> None:
    (fake_torchvision(tmp_path) / "_C.so").write_bytes(b"not a library")
    assert run(PREPARE, tmp_path).stdout.split() == ["True", "True", "False"]


@pytest.mark.slow
def test_a_missing_torchvision_is_the_persons_to_install() -> None:
    script = """
import importlib.machinery, sys
class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "torchvision" else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Without
import pytest

from fsdp.base.torch_private import import_torchvision
import_torchvision()
"""
    done = run(script)
    assert "ConfigError: torchvision is not installed. HINT: pip install -r requirements.txt" in done.stderr
