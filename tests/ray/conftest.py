"""One cluster of three nodes that the tests of this room share, and the undisturbed run that they compare
with.

Without Ray these tests skip and say why; where SHARDRUN_CI_REQUIRE names ray, they fail.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.ray.cluster import Cluster
from tests.ray.runs import Run, torchrun
from tests.support.needs import skip_or_fail


def need_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        skip_or_fail("ray", "ray is not installed (pip install 'ray[train]')")


@pytest.fixture(autouse=True)
def ray_is_here() -> None:
    need_ray()


@pytest.fixture(scope="session")
def joined() -> Iterator[Cluster]:
    """Two nodes of two CPUs, shared by the tests that break no node."""
    need_ray()
    with Cluster([2, 2]) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks under torchrun, all steps at once."""
    return torchrun(tmp_path_factory.mktemp("undisturbed"), 2)
