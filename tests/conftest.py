"""How `make test` shares the tests out among pytest's processes (pytest-xdist): a file stays in one, and so do all that share a
cluster. Slurm's and Ray's begin first, for they mostly wait. `pytest tests` runs the same tests in one process.
"""

from __future__ import annotations

import pytest

CLUSTERS = ("slurm", "ray")


# Before pytest-xdist's own, which reads the groups: it was registered later and would come first.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _group(item) not in CLUSTERS)  # stable: files keep their order
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            item.add_marker(pytest.mark.xdist_group(_group(item)))


def _group(item: pytest.Item) -> str:
    room = item.path.parent.name
    return room if room in CLUSTERS else str(item.path)
