"""A browser that tests look at pages with. Without one they skip and say why; where SHARDRUN_CI_REQUIRE names
it, they fail.
"""

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
