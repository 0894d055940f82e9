"""A browser that tests look at pages with. Without one they skip and say why; where SHARDRUN_CI_REQUIRE names it, they fail."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.browser import NAMES, Browser, find


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if find() is None:
        reason = f"no browser is installed: {', '.join(NAMES)} (apt-get install chromium)"
        required = "browser" in os.environ.get("SHARDRUN_CI_REQUIRE", "").split(",")
        (pytest.fail if required else pytest.skip)(reason)
    with Browser() as one:
        yield one
