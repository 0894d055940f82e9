"""The S3 server that tests marked needs("s3") share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoint import s3_server


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """A real server's URL."""
    with s3_server.s3_server() as url:
        yield url
