"""Restricts scaled_dot_product_attention to one kernel, `--speed.attention`.

auto leaves the choice to torch, call by call: flash, cuDNN or memory-efficient attention on CUDA, by its
order of priority for these shapes. A kernel that is named is used everywhere or the run ends: a
slower one never takes its place in silence. Not here: the attention of models that call other kernels.
"""

from __future__ import annotations

import contextlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsdp.base.errors import ConfigError
from fsdp.config import SpeedSection

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
ON_CUDA_ONLY = ("cudnn", "efficient")
AUTO = "--speed.attention auto"


def check_attention(speed: SpeedSection, device: torch.device) -> None:
    """Checks that the device has the kernel, before any process group exists."""
    if speed.attention in ON_CUDA_ONLY and device.type != "cuda":
        raise ConfigError(
            f"--speed.attention {speed.attention} is a kernel of CUDA, and this is {device.type}.", AUTO
        )


def attention_kernel(speed: SpeedSection) -> contextlib.AbstractContextManager[None]:
    """Context of a run. The setting is the process's: recomputation on autograd's thread has it too."""
    return contextlib.nullcontext() if speed.attention == "auto" else sdpa_kernel(KERNELS[speed.attention])


def refused_attention(error: Exception) -> ConfigError | None:
    """The ConfigError for an attention that the named kernel does not compute; None for other errors."""
    if "No available kernel" not in str(error):
        return None
    return ConfigError(
        "--speed.attention: the kernel does not compute this attention (its dtype, head size or mask).",
        AUTO,
    )
