"""The folder of what is made or downloaded once and can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(*names: str) -> Path:
    """$XDG_CACHE_HOME/shardrun, or ~/.cache/shardrun. RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "shardrun", *names)
