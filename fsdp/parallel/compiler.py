"""Whether units are compiled, --speed.compile: on a GPU torch's compiler needs Triton, and Triton a C
compiler, once for its launcher.

Containers made for running, not for building, often have none; without a compiler the default trains eager.
Not here: what is compiled (shard.py), where kernels are kept (compile_cache.py).
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
import sysconfig
from pathlib import Path

import torch

from fsdp.config import SpeedSection

log = logging.getLogger(__name__)

COMPILERS = ("gcc", "clang")


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
