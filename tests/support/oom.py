"""Facts of a failed allocation, for tests of the out-of-memory page."""

from __future__ import annotations

import dataclasses
from typing import Any

from fsdp.memory.oom_text import OomFacts

FACTS = OomFacts(
    rank=0,
    ranks=1,
    host="n1",
    device="cpu",
    phase="backward",
    step=1,
    error="CUDA out of memory",
    kinds={},
    held=0,
    requested=10,
    process={},
    allocator={},
    limits={},
)


def oom_facts(**changed: Any) -> OomFacts:
    return dataclasses.replace(FACTS, **changed)
