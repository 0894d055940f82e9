"""The code for workers of a cluster that is joined: this repository's, and a person's own modules.

A Ray that is started here shares this process's sys.path and needs none of it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any


def runtime_env(repository: Path, own: list[str], folder: Path) -> dict[str, Any]:
    """A folder with this code and a person's own modules, which Ray carries to every node of a joined
    cluster.

    `own` are names as in --model.name package.module:factory; what pip installed is expected on the nodes.
    """
    for package in ("fsdp", "launch"):
        shutil.copytree(repository / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in own:
        _carry(name.partition(":")[0].partition(".")[0], folder)
    return {"working_dir": str(folder)}


def _carry(module: str, folder: Path) -> None:
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
