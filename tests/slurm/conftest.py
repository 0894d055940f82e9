"""The clusters that tests share. Without Slurm they skip and say why; where SHARDRUN_CI_REQUIRE names slurm, they fail."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, Shape, best_mode, missing


def need_slurm() -> None:
    """Skip, or fail where it must not be missing."""
    reason = missing()
    if reason and "slurm" in os.environ.get("SHARDRUN_CI_REQUIRE", "").split(","):
        pytest.fail(f"SHARDRUN_CI_REQUIRE names slurm, but {reason}")
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes of eight CPUs, shared by the tests that break nothing."""
    need_slurm()
    with Cluster(tmp_path_factory.mktemp("slurm"), Shape(nodes=4)) as cluster:
        yield cluster


@pytest.fixture
def netns() -> None:
    """For tests that cut a node's power or its network."""
    need_slurm()
    if best_mode() != "netns":
        pytest.skip("nodes with a power plug need namespaces: run as root")
