"""Values of files that may come from anywhere, returned if they have exactly the expected type and range.

TypeError or ValueError otherwise, which the reader of the file turns into an error that names the file.
"""

from __future__ import annotations

from typing import Any


def checked_count(value: Any) -> int:
    """A whole number from 0 that fits in 64 bits; no bool."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!a:.40} is not a whole number from 0")
    return value


def checked_text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"a {type(value).__name__} instead of a string")
    return value
