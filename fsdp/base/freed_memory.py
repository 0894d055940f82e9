"""Returns freed memory to the kernel.

glibc keeps freed blocks below one that is in use: after the packing of 3e6 documents 88 MiB or 11, whichever
way the blocks lie; 0.3 after this.
"""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """glibc's malloc_trim; nothing with another C library."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
