"""Refuses `--memory.*` flags that the device does not support, by name, before anything is built.

Checks that need no device are in fsdp/config/checks.py.
"""

from __future__ import annotations

import logging

import torch

from fsdp.base.errors import ConfigError
from fsdp.config import MemorySection

log = logging.getLogger(__name__)


def check_device(memory: MemorySection, device: torch.device) -> None:
    """Raises ConfigError, on every rank the same."""
    if memory.nvme != "off" and device.type != "cpu" and not memory.cpu_offload:
        raise ConfigError(
            f"--memory.nvme {memory.nvme} keeps the optimizer on the host, and parameters are on "
            f"{device.type}.",
            "--memory.cpu_offload true",
        )
    if memory.cpu_offload and device.type == "cpu":
        log.warning(
            "--memory.cpu_offload true changes nothing on a CPU: parameters are in host memory already"
        )
    if memory.optimizer_offload and device.type == "cpu":
        log.warning(
            "--memory.optimizer_offload true gains nothing on a CPU: states are copied within host memory"
        )
    if memory.activation_offload and device.type == "cpu":
        log.warning(
            "--memory.activation_offload true gains nothing on a CPU: what forward keeps is copied within "
            "host memory"
        )
