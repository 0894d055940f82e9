"""shardrun, installed by pip or imported from a clone: its code as `fsdp` and `launch`, and the Python API.

    import shardrun
    shardrun.train(["--config", "recipes/digits.toml", "--run.dir", "runs/mine"])

The parts for a loop of one's own are listed in docs/library.md. Each name is imported on first use: importing
this package takes no torch. `fsdp` and `launch` lie in this folder if pip installed them, and beside it in a
clone: that folder comes first on sys.path.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

_HERE = Path(__file__).resolve().parent
IS_INSTALLED = (_HERE / "fsdp").is_dir()
CODE = _HERE if IS_INSTALLED else _HERE.parent
"""The folder that contains train.py, fsdp/, launch/ and what is installed beside them."""

_PARTS = {
    "train": "launch.in_process", "load_config": "launch.in_process", "record_of": "launch.in_process",
    "Outcome": "fsdp.run.training_loop",
    "Config": "fsdp.config", "DistEnv": "fsdp.distributed.env", "ShardrunError": "fsdp.base.errors",
    "process": "fsdp.run.own_loop", "shard": "fsdp.run.own_loop", "Training": "launch.in_process",
    "Reporter": "fsdp.record.recorder", "app_reader": "fsdp.checkpoint.export", "submit": "launch.submit",
}  # fmt: skip
"""Names of the API, and the modules that define them."""


def _use_code() -> None:
    """Raises ImportError if another package called fsdp or launch has been imported."""
    sys.path[:] = [str(CODE), *(place for place in sys.path if place != str(CODE))]
    for name in ("fsdp", "launch"):
        found = sys.modules.get(name)
        place = Path(str(getattr(found, "__file__", "")))
        if found is not None and not place.resolve().is_relative_to(CODE):
            raise ImportError(f"{place} was imported as {name} before shardrun. HINT: import shardrun first")


_use_code()

if TYPE_CHECKING:
    from fsdp.base.errors import ShardrunError
    from fsdp.checkpoint.export import app_reader
    from fsdp.config import Config
    from fsdp.distributed.env import DistEnv
    from fsdp.record.recorder import Reporter
    from fsdp.run.evaluate import Outcome
    from fsdp.run.own_loop import process, shard
    from launch.in_process import Training, load_config, record_of, train
    from launch.submit import submit


def __getattr__(name: str) -> Any:
    if name not in _PARTS:
        raise AttributeError(f"module shardrun has no attribute {name}")
    return getattr(importlib.import_module(_PARTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PARTS})


__all__ = [
    "CODE", "Config", "DistEnv", "Outcome", "Reporter", "ShardrunError", "Training", "app_reader",
    "load_config", "process", "record_of", "shard", "submit", "train",
]  # fmt: skip
