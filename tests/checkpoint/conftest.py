"""What some tests need beside the product: an S3 server.

Without it they skip and say why; where SHARDRUN_CI_REQUIRE names s3, they fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.checkpoint import s3_server


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """A real server's URL."""
    if s3_server.program() is None:
        if "s3" in os.environ.get("SHARDRUN_CI_REQUIRE", "").split(","):
            pytest.fail(f"SHARDRUN_CI_REQUIRE names s3, but {s3_server.MISSING}")
        pytest.skip(s3_server.MISSING)
    with s3_server.s3_server() as url:
        yield url
