"""Packages that a kind of file needs: imported where such a file is read, as most runs need none."""

from __future__ import annotations

import importlib
from typing import Any

from fsdp.base.errors import ConfigError


def optional(package: str, name: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(
            f"{name} needs the package {package}, which is not installed.", f"pip install {package}"
        ) from None
