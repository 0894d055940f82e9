"""Seconds and bytes as people read them."""

from __future__ import annotations

BELOW_1000 = 999.5
"""From here on three digits are rounded to 1e+03."""


def seconds(value: float) -> str:
    """Three digits, in the unit that fits; `?` for NaN."""
    if value != value:
        return "?"
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    minutes, hours = value / 60, value / 3600
    if minutes < 120:
        return f"{minutes:.0f} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


def byte_size(count: float) -> str:
    """Three significant digits, binary units."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < BELOW_1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB" if abs(count) < BELOW_1000 else f"{count / 1024:.3g} TiB"
