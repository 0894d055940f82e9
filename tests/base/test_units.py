"""Seconds and bytes have three digits and no exponent."""

from __future__ import annotations

import pytest

from fsdp.base.text import byte_size, seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0123, "12.3 ms"),
        (0.99949, "999 ms"),
        (0.9996, "1 s"),
        (1.0, "1 s"),
        (119.0, "119 s"),
        (7200, "2.0 h"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (999, "999 B"),
        (999.6 * 1024, "0.976 MiB"),
        (1023.0 * 2**20, "0.999 GiB"),
        (999.8 * 2**30, "0.976 TiB"),
    ],
)
def test_bytes(count: float, text: str) -> None:
    assert byte_size(count) == text
