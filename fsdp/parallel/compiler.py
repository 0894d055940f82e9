"""Whether units are compiled, --speed.compile: on a GPU torch's compiler needs Triton, and Triton a C
compiler, once for its launcher.

Containers made for running, not for building, often have none; without a compiler the default trains eager.
Not here: what is compiled (shard.py).
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
import stat
import sysconfig
import tempfile
from pathlib import Path

import torch

from fsdp.base.errors import ConfigError
from fsdp.config import SpeedSection
from fsdp.dist.env import set_variable

log = logging.getLogger(__name__)

COMPILERS = ("gcc", "clang")
FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def compiles(speed: SpeedSection, device: torch.device) -> bool:
    """auto compiles on CUDA, where that is possible."""
    if speed.compile != "auto":
        return speed.compile == "true"
    return device.type == "cuda" and not missing()


@functools.cache
def missing() -> str:
    """What Triton needs and this machine lacks; empty if nothing. Logs it, once a process."""
    lacks = ""
    if importlib.util.find_spec("triton") is None:
        lacks = "the package triton"
    elif not (os.environ.get("CC") or any(map(shutil.which, COMPILERS))):
        lacks = "a C compiler (gcc, clang, or CC)"
    elif not _header().exists():
        lacks = f"{_header()} (the package python3-dev)"
    if lacks:
        log.warning(
            "--speed.compile auto: units are not compiled, which is slower: Triton needs %s. "
            "HINT: install it, or --speed.compile false",
            lacks,
        )
    return lacks


def _header() -> Path:
    return Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")


def set_kernel_folders() -> None:
    """Where torch and Triton keep kernels, if the environment does not say: on the node's disk. Triton's own
    place is the home, which may be read-only, full, or shared by nodes that meet each other's locks.
    """
    torchs, tritons = FOLDERS
    if not os.environ.get(torchs):
        set_variable(torchs, str(_own_folder()))
    if not os.environ.get(tritons):
        set_variable(tritons, str(Path(os.environ[torchs], "triton").absolute()))


def _own_folder() -> Path:
    """Under a name that anybody could have taken, and what lies there is executed."""
    folder = Path(tempfile.gettempdir(), f"shardrun-compile-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
        ours = about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        wrong = "" if ours and folder.is_dir() else "others can write to it, and what lies there is executed"
    except OSError as error:
        wrong = str(error.strerror)
    if wrong:
        hint = f"export {FOLDERS[0]}=FOLDER, one of your own on the node's disk; or --speed.compile false"
        raise ConfigError(f"--speed.compile: no kernels can lie in {folder}: {wrong}.", hint, scope="node")
    return folder
