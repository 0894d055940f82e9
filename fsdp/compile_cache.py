"""Where compiled kernels are kept, so that the next start of a job, on whichever node, compiles nothing anew.

torch keeps them under /tmp, which a requeued job on another node does not have. Entries are code that is run when they are
found: they lie in a folder of the user's own, in the home that a cluster's nodes share, never in a run directory that somebody
else may have written; a folder that others can write to is refused. Not here: what is compiled (fsdp/shard.py).
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from pathlib import Path

import torch

from fsdp.config import SpeedSection
from fsdp.errors import ConfigError
from fsdp.shard import compiles

log = logging.getLogger(__name__)

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def place(speed: SpeedSection) -> Path | None:
    """The folder that the flag means; None leaves it to torch, or to who has set torch's own variable."""
    if speed.compile_cache == "off" or (speed.compile_cache == "auto" and _chosen_already()):
        return None
    if speed.compile_cache != "auto":
        return Path(speed.compile_cache).absolute()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "shardrun", "compile")


def _chosen_already() -> bool:
    """Somebody has set torch's variable; torch itself sets it, too, to its own default."""
    return not os.environ.get(VARIABLE, torchs_own()).startswith(torchs_own())


def torchs_own() -> str:
    return str(Path(tempfile.gettempdir(), "torchinductor_"))


def set_compile_cache(speed: SpeedSection, device: torch.device) -> Path | None:
    """Before anything is compiled. Every rank writes there: torch gives a file its name when it is whole."""
    folder = place(speed) if compiles(speed, device) else None
    if folder is None:
        return None
    _make_own(folder)
    before = os.environ.get(VARIABLE, "not set")
    os.environ[VARIABLE] = str(folder)
    if before != str(folder):
        log.info("%s: %s → %s", VARIABLE, before, folder)
    return folder


def _make_own(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except OSError as error:
        what = f"--speed.compile_cache {folder} cannot be made ({error.strerror})."
        raise ConfigError(what, "--speed.compile_cache off") from None
    if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"--speed.compile_cache {folder} can be written by others, and what lies there is run as code.",
            f"chmod 700 {folder} if it is yours, or --speed.compile_cache off",
        )
