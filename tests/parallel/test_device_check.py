"""Flags that a device does not support are refused by name; those without effect there are logged."""

from __future__ import annotations

import logging

import pytest
import torch

from fsdp.base.errors import ConfigError
from fsdp.config import MemorySection
from fsdp.parallel.checks import check_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_files_on_cuda_need_the_update_on_the_host() -> None:
    memory = MemorySection(nvme="optimizer", nvme_dir="/tmp")
    with pytest.raises(
        ConfigError,
        match=r"--memory.nvme optimizer keeps the optimizer on the host.*HINT: --memory.cpu_offload",
    ):
        check_device(memory, CUDA)
    check_device(memory, CPU)
    check_device(MemorySection(nvme="all", nvme_dir="/tmp", cpu_offload=True), CUDA)


def test_an_offload_without_effect_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_device(MemorySection(cpu_offload=True), CUDA)
        assert not caplog.messages
        check_device(MemorySection(cpu_offload=True), CPU)
        check_device(MemorySection(activation_offload=True), CPU)
    assert "--memory.activation_offload true gains nothing on a CPU" in caplog.text
    assert "--memory.cpu_offload true gains nothing on a CPU" in caplog.text
