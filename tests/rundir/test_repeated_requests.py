"""A file server whose reply is lost: the client repeats a rename or link that is done, and gets an error.

The server is a stand-in: the calls are made twice.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fsdp.base.errors import RefusedError
from fsdp.checkpoint.local_store import LocalStore
from fsdp.rundir.atomic_write import rename, write_atomically
from fsdp.rundir.lock import FILE
from fsdp.rundir.paths import create
from tests.support.locks import acquire


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rename, link and deletion is done, and then done again."""
    for name in ("rename", "replace", "link", "unlink"):
        once = getattr(os, name)

        def twice(*words: Any, once: Any = once, **more: Any) -> None:
            once(*words, **more)
            if not more:  # shutil.rmtree's: what it leaves, the next pruning deletes
                once(*words, **more)

        monkeypatch.setattr(os, name, twice)


@pytest.mark.usefixtures("repeats")
def test_a_file_is_replaced_once(tmp_path: Path) -> None:
    for text in ("one", "two"):
        write_atomically(tmp_path / "DONE", text)
    assert [path.name for path in tmp_path.iterdir()] == ["DONE"]
    assert (tmp_path / "DONE").read_text() == "two"


@pytest.mark.usefixtures("repeats")
def test_a_lock_is_taken_released_and_taken_over(tmp_path: Path) -> None:
    lock = acquire(tmp_path, "test")
    with pytest.raises(RefusedError):
        acquire(tmp_path, "another")
    lock.release()
    (tmp_path / FILE).write_text("{}\n")
    acquire(tmp_path, "test", stale_s=0.0).release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("repeats")
def test_a_checkpoint_is_sealed_set_aside_and_deleted(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for step in (1, 2):
        store.begin(store.staging(step, "0123abcd"))
        store.write(store.staging(step, "0123abcd"), "manifest.json", [b"{}"])
        store.seal(store.staging(step, "0123abcd"), store.final(step, "0123abcd"))
    assert store.set_aside("step-00000001", "size") == "step-00000001.broken-size"
    store.remove("step-00000002", "0123abcd")
    assert store.folders() == ["step-00000001.broken-size"]


def test_a_source_that_never_was_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    with pytest.raises(FileNotFoundError):
        rename(tmp_path / "source", tmp_path / "target")


@pytest.mark.usefixtures("repeats")
def test_a_run_directory_is_made(tmp_path: Path) -> None:
    create(tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["logs", "tensorboard"]


@pytest.mark.usefixtures("repeats")
def test_a_link_to_a_checkpoint_is_removed_alone(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "step-00000001").symlink_to(tmp_path / "elsewhere")
    LocalStore(tmp_path / "here").remove("step-00000001", "0123abcd")
    assert list((tmp_path / "here").iterdir()) == []
    assert (tmp_path / "elsewhere").is_dir()
