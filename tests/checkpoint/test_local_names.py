"""The name of a run's folders on the nodes' own disks: the same for the same run, another for any other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp.checkpoint.local_tier import TOKEN, local_folder_name
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


def test_a_folder_restored_to_its_place_keeps_its_name(tmp_path: Path) -> None:
    """As on a file system that numbers its inodes anew."""
    run, backup = tmp_path / "checkpoints", tmp_path / "backup"
    name = name_of(run)
    shutil.copytree(run, backup)
    shutil.rmtree(run)
    (tmp_path / "takes the inode").mkdir()
    shutil.copytree(backup, run)
    assert name_of(run) == name


@pytest.mark.parametrize("foreign", ["../../elsewhere", "", "shardrun-../x", 7])
def test_a_foreign_name_leads_nowhere(foreign: object, tmp_path: Path) -> None:
    (tmp_path / TOKEN).write_text(json.dumps({"name": foreign, "place": str(tmp_path), "inode": 1}))
    name = name_of(tmp_path)
    assert name != foreign
    assert name.startswith("shardrun-")
    assert name.removeprefix("shardrun-").isalnum()


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    import fsspec

    yield ObjectStore(f"memory://{abs(hash(request.node.name)):x}/checkpoints")
    fsspec.filesystem("memory").store.clear()


def test_a_run_in_an_object_store_has_one_name_on_all_machines(store: ObjectStore) -> None:
    name = local_folder_name(store)
    assert local_folder_name(store) == name
    assert store.folders() == []
    store._fs.rm(f"{store._root}/{TOKEN}")
    assert local_folder_name(store) != name, "of a deleted run"
