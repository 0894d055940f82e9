"""The clusters that tests share, and the scenarios that run side by side.

Without Slurm these tests skip and say why; where SHARDRUN_CI_REQUIRE names slurm, they fail.

A scenario brings up a Slurm, lets something happen to jobs on it, and returns what is left; tests look at
that. Most of a scenario is waiting (for a time limit, a requeue, a node to be given up), so those that the
selected tests need start together.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.slurm import scenarios
from tests.slurm.cluster import Cluster, Shape, missing
from tests.slurm.job import Undisturbed
from tests.support.needs import skip_or_fail

AT_ONCE = 4


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "scenario(name): the function of tests/slurm/scenarios.py whose outcome the test looks at"
    )


def need_slurm() -> None:
    """Skip, or fail where it must not be missing."""
    if reason := missing():
        skip_or_fail("slurm", reason)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes of eight CPUs, shared by the tests that break nothing."""
    need_slurm()
    with Cluster(tmp_path_factory.mktemp("slurm"), Shape(nodes=3)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Any]]]:
    """The scenarios of a file's selected tests, started in the order of the tests as soon as the first asks.
    Not of all files: each process of pytest knows all tests and would start what another one looks at.
    """
    items = [
        item
        for item in request.session.items
        if item.path == request.path and not item.get_closest_marker("skip")
    ]
    wanted = dict.fromkeys(
        marker.args[0] for item in items if (marker := item.get_closest_marker("scenario"))
    )
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(getattr(scenarios, name), tmp_path_factory.mktemp(name)) for name in wanted}
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def outcome(request: pytest.FixtureRequest) -> Any:
    """What the test's scenario left behind."""
    need_slurm()
    marker = request.node.get_closest_marker("scenario")
    return request.getfixturevalue("running")[marker.args[0]].result()
