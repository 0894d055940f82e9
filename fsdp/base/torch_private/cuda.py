"""The history of CUDA's caching allocator. The public torch.cuda.memory_snapshot has blocks, but no history.

Without a GPU only names and signatures are tested. When they change, a profile on CUDA has no memory by kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def allocator_snapshot() -> dict[str, Any]:
    """Segments with their blocks, and per device the recorded events (`device_traces`)."""
    found: dict[str, Any] = torch.cuda.memory._snapshot()
    return found


def start_allocator_history(most_events: int) -> None:
    """Records each allocation and release with its Python stack, at most `most_events` of them."""
    torch.cuda.memory._record_memory_history(max_entries=most_events, stacks="python")


def stop_allocator_history() -> None:
    torch.cuda.memory._record_memory_history(enabled=None)


def write_allocator_snapshot(path: Path) -> None:
    """The file that https://pytorch.org/memory_viz reads."""
    torch.cuda.memory._dump_snapshot(str(path))
