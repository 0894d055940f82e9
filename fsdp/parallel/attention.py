"""Restricts scaled_dot_product_attention to one kernel, `--speed.attention`.

auto leaves the choice to torch, call by call: flash, cuDNN or memory-efficient attention on CUDA, by its
order of priority for these shapes. A kernel that is named is used everywhere or the run ends: a
slower one never takes its place in silence. fa3 and fa4 are FlashAttention's own packages, which torch calls
in place of its flash kernel. Not here: the attention of models that call other kernels.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import torch
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from fsdp.base.errors import ConfigError, first_line
from fsdp.config import SpeedSection

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
ON_CUDA_ONLY = ("cudnn", "efficient", "fa3", "fa4")
PACKAGES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}
"""The module of each package of FlashAttention, which torch imports when it is activated."""
AUTO = "--speed.attention auto"


def check_attention(speed: SpeedSection, device: torch.device) -> None:
    """Checks that the device has the kernel, before any process group exists."""
    if speed.attention in ON_CUDA_ONLY and device.type != "cuda":
        raise ConfigError(
            f"--speed.attention {speed.attention} is a kernel of CUDA, and this is {device.type}.", AUTO
        )
    package = PACKAGES.get(speed.attention)
    if package is not None and not _is_installed(package):
        raise ConfigError(
            f"--speed.attention {speed.attention} needs the module {package}, which is not installed.", AUTO
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def attention_kernel(speed: SpeedSection) -> contextlib.AbstractContextManager[None]:
    """Context of a run. The setting is the process's: recomputation on autograd's thread has it too."""
    if speed.attention in PACKAGES:
        return _flash_of_a_package(speed.attention)
    return contextlib.nullcontext() if speed.attention == "auto" else sdpa_kernel(KERNELS[speed.attention])


@contextlib.contextmanager
def _flash_of_a_package(name: str) -> Iterator[None]:
    """torch's flash operators are the package's; it refuses what it does not compute by itself."""
    try:
        activate_flash_attention_impl(name.upper())
    except (ImportError, RuntimeError, ValueError) as error:
        what = f"--speed.attention {name} cannot be activated ({first_line(error)})."
        raise ConfigError(what, AUTO) from error
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        restore_flash_attention_impl()


def refused_attention(error: Exception) -> ConfigError | None:
    """The ConfigError for an attention that the named kernel does not compute; None for other errors."""
    if "No available kernel" not in str(error):
        return None
    return ConfigError(
        "--speed.attention: the kernel does not compute this attention (its dtype, head size or mask).",
        AUTO,
    )
