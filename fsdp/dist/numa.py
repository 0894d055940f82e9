"""Binds a rank to the processors of its GPU's NUMA node, `--run.numa`, under any launcher.

Its threads then allocate host memory there: pinned batches and saves do not cross the link between sockets.
torchrun --numa-binding does so for torchrun's own ranks; a process whose processors are already those of one
node is left as it is. Called before threads start: they inherit the processors.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fsdp.dist.env import DistEnv

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

SYS = Path("/sys")


def maybe_bind(choice: Literal["auto", "node", "off"], env: DistEnv) -> None:
    """auto binds the ranks of a machine with several: a lone one may use the processors of all nodes."""
    if env.device.type != "cuda" or choice == "off" or (choice == "auto" and env.local_world_size == 1):
        return
    bind(pci_address(env.device))


def pci_address(device: torch.device) -> str:
    """As /sys/bus/pci/devices names it; torch.numa reads the same fields."""
    import torch

    about: Any = torch.cuda.get_device_properties(device)
    return f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"


def bind(address: str) -> None:
    """Keeps those of this process's processors that are on the device's node; all of them if none is."""
    node = node_of(address)
    allowed = os.sched_getaffinity(0)
    kept = allowed & processors_of(node) if node is not None else set()
    if not kept or kept == allowed:
        log.debug("GPU %s: not bound to a NUMA node", address)
        return
    os.sched_setaffinity(0, kept)
    log.info("GPU %s: bound to NUMA node %d, %d of %d processors", address, node, len(kept), len(allowed))


def node_of(address: str) -> int | None:
    """None where the kernel knows none, as on machines of one node and in many virtual machines."""
    try:
        node = int((SYS / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def processors_of(node: int) -> set[int]:
    """From a list such as 0-3,8-11."""
    try:
        text = (SYS / f"devices/system/node/node{node}/cpulist").read_text().strip()
        spans = [part.partition("-") for part in text.split(",") if part]
        return {cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):
        return set()
