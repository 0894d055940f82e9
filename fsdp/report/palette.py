"""Colours as class names of page.css: one for each kind of memory on every page, and a row for anything else.

page.css has the values, for light and for dark.
"""

from __future__ import annotations

MEMORY_KINDS = (
    "parameters", "gathered", "gradients", "whole-gradients", "optimizer", "activations", "offloaded",
    "buffers", "communication", "other", "outside", "requested", "free",
)  # fmt: skip
"""Those of fsdp/memory/account.py and fsdp/plan/trace.py; outside: of the process or the allocator, in no
other kind.
"""
OTHER_NAMES = {"whole_gradients": "whole-gradients", "beyond": "outside"}
ROW = 9


def colour(nth: int) -> str:
    return f"c{nth % ROW}"


def kind_colour(kind: str) -> str:
    """An unknown kind, which a file may name, has the colour of `other`."""
    name = OTHER_NAMES.get(kind, kind)
    return f"k-{name if name in MEMORY_KINDS else 'other'}"
