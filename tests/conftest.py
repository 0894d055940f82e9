"""The order of the tests. `make test` shares their files out among pytest's processes (pytest-xdist): a file stays in one, and
those of Slurm and Ray begin first, for they mostly wait. `pytest tests` runs the same tests in one process.
"""

from __future__ import annotations

import pytest

CLUSTERS = ("slurm", "ray")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name not in CLUSTERS)  # stable: files keep their order
