"""Memory of this process and its device at four points of a start, as RUN/profile/rankN_startup.json.

Taken with --profile.memory: before the model is built, after it (on meta, where it can be), after sharding
and filling its weights, after the optimizer. Optimizer states follow with the first update.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from fsdp.base.units import byte_size
from fsdp.config import ProfileSection
from fsdp.dist.env import DistEnv
from fsdp.memory.account import device_bytes, process_bytes

log = logging.getLogger(__name__)

LAST = "after the optimizer"


class StartupMemory:
    """`mark` is called with the name of each point of the start; LAST writes the file."""

    def __init__(self, section: ProfileSection, env: DistEnv, run_dir: Path) -> None:
        self._on, self._env, self._folder = section.memory, env, run_dir / "profile"
        self._marks: list[dict[str, Any]] = []

    def mark(self, point: str) -> None:
        if not self._on:
            return
        device = device_bytes(self._env.device)
        self._marks.append({"at": point, "process": process_bytes(), "allocator": device})
        if point == LAST:
            self._write()

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"rank{self._env.rank}_startup.json"
        file.write_text(json.dumps({"format": 1, "marks": self._marks}, indent=1) + "\n", encoding="utf-8")
        if self._env.is_main:
            held = (f"{mark['at']} {byte_size(_held(mark))}" for mark in self._marks)
            log.info("memory: %s", ", ".join(held))


def _held(mark: dict[str, Any]) -> int:
    """Allocated on the device; on the CPU, resident and anonymous."""
    return int(mark["allocator"].get("allocated", mark["process"].get("rss_anon", 0)))
