"""docs/knobs.md names every flag of memory, speed and communication, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from fsdp import config as configuration

PAGE = (Path(__file__).parents[2] / "docs" / "knobs.md").read_text(encoding="utf-8")
SECTIONS = ("memory.", "speed.", "comm.")


def test_every_field_of_memory_speed_and_communication_is_named() -> None:
    assert [
        name for name in configuration.FIELDS if name.startswith(SECTIONS) and f"--{name}" not in PAGE
    ] == []


def test_every_flag_on_the_page_exists() -> None:
    named = set(re.findall(r"--([a-z]+\.[a-z_0-9]+)", PAGE))
    assert {name for name in named if name not in configuration.FIELDS} == set()
