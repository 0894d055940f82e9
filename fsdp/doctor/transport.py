"""NCCL's transport: turns its log on while the doctor forms a process group on CUDA, and reads it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.dist import nccl_log

INFINIBAND = Path("/sys/class/infiniband")
SETTINGS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,GRAPH"}


@contextmanager
def recorded(on_cuda: bool) -> Iterator[Path | None]:
    """A folder into which NCCL logs; None on a CPU, and where NCCL_DEBUG is set already."""
    if not on_cuda or "NCCL_DEBUG" in os.environ:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="doctor-nccl-") as folder:
        added = {**SETTINGS, "NCCL_DEBUG_FILE": f"{folder}/%h.%p.log"}
        os.environ.update(added)
        try:
            yield Path(folder)
        finally:
            for name in added:
                os.environ.pop(name, None)


def read(folder: Path, nodes: int) -> dict[str, Any]:
    """What this rank's log says, as the doctor's report has it."""
    return about(sorted(folder.glob("*.log")), nodes, host_devices())


def about(files: Sequence[Path], nodes: int, devices: Sequence[str]) -> dict[str, Any]:
    """`nodes` 0: several if the log has a connection between nodes."""
    lines: list[str] = []
    for file in files:
        try:
            lines += file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            raise ConfigError(f"{file} cannot be read ({error.strerror}).", "--nccl-log FILE") from None
    found = nccl_log.read_log(lines)
    nodes = nodes or 1 + bool(found.total("NET/"))
    judged = nccl_log.verdicts(found, nodes=nodes, host_devices=devices)
    return {
        "summary": nccl_log.summary(found),
        "verdicts": [asdict(one) for one in judged],
        "facts": asdict(found),
    }


def host_devices() -> list[str]:
    """The node's InfiniBand and RoCE devices, as the kernel lists them."""
    return sorted(one.name for one in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []


def text(seen: dict[str, Any]) -> str:
    lines = [seen["summary"]]
    for one in seen["verdicts"]:
        lines.append(f"{'odd ' if one['hint'] else 'ok  '} {one['what']}.")
        lines += [f"     HINT: {one['hint']}"] if one["hint"] else []
    return "\n".join(lines)
