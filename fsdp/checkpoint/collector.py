"""Python's cycle collector, held while a plan of very many small objects is made or read.

At thousands of ranks a checkpoint's metadata are hundreds of thousands of objects without one cycle; the collector would walk
all of them again and again as they come (measured at 4,096 ranks: 14 s to read `.metadata`, 1.2 s without it).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held() -> Iterator[None]:
    """Of two threads within it the one that came first starts it again."""
    ran = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if ran:
            gc.enable()
