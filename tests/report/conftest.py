"""A browser for tests of pages. Without one they skip, or fail if SHARDRUN_CI_REQUIRE names it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.browser import NAMES, Browser, find
from tests.support.needs import skip_or_fail


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if find() is None:
        reason = f"no browser is installed: {', '.join(NAMES)} (apt-get install chromium)"
        skip_or_fail("browser", reason)
    with Browser() as one:
        yield one
