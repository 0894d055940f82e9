"""Measures a rank's device: a matrix product's speed and result, free memory, the driver's error counts."""

from __future__ import annotations

import shutil
import subprocess
import time
from typing import Any

import torch

from fsdp.base import devices, proc

SECONDS = 0.4
NVIDIA_SMI_S = 10.0
HEALTH = (
    # field of nvidia-smi, text of the finding, values of a healthy device
    ("ecc.errors.uncorrected.volatile.total", "uncorrected memory errors", ("0",)),
    ("retired_pages.pending", "memory pages wait for retirement", ("No",)),
    ("clocks_throttle_reasons.hw_slowdown", "slowed by its hardware (heat, power)", ("Not Active",)),
)


def check(device: torch.device, name: str) -> dict[str, Any]:
    on_cuda = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if on_cuda else (384, torch.float32)
    free, total = memory(device)  # before the product, whose matrices stay in torch's cache
    rate, value = product(device, size, dtype)
    known = devices.find(name) if on_cuda else None
    return {
        "tflops": rate,
        "product": value,
        "peak_tflops": known.bf16_tflops if known else 0.0,
        "memory_free": free,
        "memory_total": total,
        "health": health(device) if on_cuda else [],
        "cudnn": cudnn(device) if on_cuda else 0,
    }


def product(device: torch.device, size: int, dtype: torch.dtype) -> tuple[float, float]:
    """TFLOP/s over SECONDS, and a number that is the same on every device that computes correctly."""
    generator = torch.Generator().manual_seed(7)
    left = torch.randn(size, size, generator=generator).to(device, dtype)
    right = torch.randn(size, size, generator=generator).to(device, dtype)
    out = torch.mm(left, right)
    value = float(out.double().abs().mean())
    synchronize(device)
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        for _ in range(8):
            torch.mm(left, right, out=out)
        # the host runs ahead of the device
        synchronize(device)
        done += 8
    return 2.0 * size**3 * done / (time.perf_counter() - began) / 1e12, value


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of the device, or of the node on the CPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    node = proc.node_memory_bytes()
    return node["MemAvailable"], node["MemTotal"]


def cudnn(device: torch.device) -> int:
    """cuDNN's version where torch prefers its attention, if it is new enough; 0 elsewhere."""
    preferring = torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))
    return (torch.backends.cudnn.version() or 0) if preferring else 0


def health(device: torch.device) -> list[str]:
    """Errors that the driver counts on this device; empty without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    fields = ",".join(field for field, _, _ in HEALTH)
    which = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        done = subprocess.run(
            [program, which, f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return [f"nvidia-smi does not answer within {NVIDIA_SMI_S:.0f} s"]
    except (subprocess.CalledProcessError, OSError):
        return []  # an older version that lacks a field
    return complaints(done.stdout)


def complaints(line: str) -> list[str]:
    values = [value.strip() for value in line.strip().split(",")]
    return [
        f"{text}: {value}"
        for value, (_, text, healthy) in zip(values, HEALTH, strict=False)
        if value not in healthy and not value.startswith("[")  # [N/A], [Not Supported]
    ]
