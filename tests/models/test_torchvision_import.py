"""A torchvision whose extension cannot load is imported all the same; the operators of one that can are left
alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKES = """
import torch

for name in ("nms", "qnms"):
    torch.library.register_fake(f"torchvision::{name}")(lambda boxes, scores, most: scores)
"""
EXTENSION = """
import torch

library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor boxes, Tensor scores, float most) -> Tensor")
"""
SEEN = "import torch, torchvision; print(torch.ops.torchvision.nms.default._schema)"


def imported(folder: Path, extension: str, before: str) -> str:
    """The schema of an operator, where the import of this torchvision succeeds."""
    (folder / "torchvision").mkdir()
    (folder / "torchvision/_meta_registrations.py").write_text(FAKES)
    (folder / "torchvision/__init__.py").write_text(f"{extension}\nfrom . import _meta_registrations\n")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, "-c", f"{before}; {SEEN}"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("extension", ["", EXTENSION])
def test_schemas_are_declared_where_the_extension_has_none(extension: str, tmp_path: Path) -> None:
    assert ("Tensor dets" in imported(tmp_path, extension, "import fsdp")) == (not extension)


@pytest.mark.slow
@pytest.mark.parametrize("before", ["pass", pytest.param("import fsdp", marks=pytest.mark.long)])
def test_the_copy_that_make_setup_installs(before: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text((ROOT / "fsdp/__init__.py").read_text())
    assert "Tensor dets" in imported(tmp_path, "", before)
