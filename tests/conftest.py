"""The order of the tests, and which of them wait for the full form. `make test` shares their files out among pytest's processes
(pytest-xdist): a file stays in one, and those of Slurm and Ray begin first, for they mostly wait. `pytest tests` runs the same
tests in one process.
"""

from __future__ import annotations

import os

import pytest

CLUSTERS = ("slurm", "ray")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name not in CLUSTERS)  # stable: files keep their order
    for item in items:
        if item.get_closest_marker("long") and not os.environ.get("SHARDRUN_FULL"):
            item.add_marker(pytest.mark.skip(reason="part of the full form: SHARDRUN_FULL=1"))
