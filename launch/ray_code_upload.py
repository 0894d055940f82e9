"""The code for workers of a joined cluster: this repository's and the user's own modules.

A local Ray shares this process's sys.path and needs no upload.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any


def runtime_env(repository: Path, own: list[str], folder: Path) -> dict[str, Any]:
    """A runtime_env with a folder of this code and the user's modules, which Ray copies to every node.

    `own` are names as in --model.name package.module:factory. Packages installed with pip must be on the
    nodes.
    """
    for package in ("fsdp", "launch"):
        shutil.copytree(repository / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in own:
        _copy(name.partition(":")[0].partition(".")[0], folder)
    return {"working_dir": str(folder)}


def _copy(module: str, folder: Path) -> None:
    import importlib.util

    found = importlib.util.find_spec(module)
    if found is None or (folder / module).exists():
        return
    for place in found.submodule_search_locations or ([found.origin] if found.origin else []):
        source = Path(place)
        if "site-packages" in source.parts:
            continue
        if source.is_dir():
            shutil.copytree(
                source, folder / module, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
            )
        elif source.suffix == ".py":
            shutil.copy(source, folder)
