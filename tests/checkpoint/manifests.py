"""A manifest as a save writes it, for tests that need one with few fields of their own."""

from __future__ import annotations

from typing import Any

from fsdp.checkpoint.manifest import Manifest


def a_manifest(**fields: Any) -> Manifest:
    plain: dict[str, Any] = {
        "step": 1, "attempt": "", "created": 0.0, "torch": "", "strategy": "fsdp", "replicate": 1, "shard": 1,
        "ranks": 1, "config": "", "reason": "", "counters": {}, "metrics": {}, "files": {}, "digests": {},
    }  # fmt: skip
    return Manifest(**{**plain, **fields})
