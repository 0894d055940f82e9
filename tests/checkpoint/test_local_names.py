"""The name of a run's folders on the nodes' own disks: the same for the same run, another for any other."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp.checkpoint.local_tier import local_folder_name
from fsdp.checkpoint.store import LocalStore, ObjectStore


def name_of(place: Path) -> str:
    return local_folder_name(LocalStore(place))


def test_a_run_that_is_linked_or_moved_keeps_its_local_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "run" / "checkpoints"
    name = name_of(run)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert name_of(tmp_path / "link" / "checkpoints") == name
    (tmp_path / "run").rename(tmp_path / "moved")
    assert name_of(tmp_path / "moved" / "checkpoints") == name
    assert name_of(tmp_path / "moved" / "checkpoints") == name, "and afterwards"


def test_a_copy_of_a_run_has_local_folders_of_its_own(tmp_path: Path) -> None:
    """It would resume, copy and delete the checkpoints of the other run on the same nodes."""
    run, copy = tmp_path / "run" / "checkpoints", tmp_path / "copy" / "checkpoints"
    name = name_of(run)
    shutil.copytree(run, copy)
    other = name_of(copy)
    assert other != name
    assert (name_of(run), name_of(copy)) == (name, other)


def test_a_run_whose_checkpoints_were_deleted_has_another_name(tmp_path: Path) -> None:
    run = tmp_path / "checkpoints"
    name = name_of(run)
    shutil.rmtree(run)
    assert name_of(run) != name


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    import fsspec

    yield ObjectStore(f"memory://{abs(hash(request.node.name)):x}/checkpoints")
    fsspec.filesystem("memory").store.clear()
