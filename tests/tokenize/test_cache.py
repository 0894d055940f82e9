"""Files of the cache: whole after a power cut, one line where the disk is full."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp.base.errors import ConfigError
from fsdp.tokenize import cache
from fsdp.tokenize.conversations import Document
from fsdp.tokenize.shards import SplitFiles


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_what_is_made_is_synced_before_it_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut left a file of zeros under the name, which each later start read."""
    done, fsync, rename = list[str](), os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> Any:
        done.append("renamed")
        return rename(source, target)

    def make(aside: Path) -> None:
        (aside / "train").mkdir(parents=True)
        np.save(aside / "train" / "ends.npy", np.arange(3))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    made = cache.made_once("files", ["a"], make)
    assert {"ends.npy", "train", f"{made.name}.partial"} == set(done[:-1])
    assert done[-1] == "renamed"
    assert np.load(made / "train" / "ends.npy").tolist() == [0, 1, 2]


def test_a_name_that_the_disk_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a traceback about a file that does not exist."""

    def refused(source: Path, target: Path) -> Any:
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(
        ConfigError, match=r"data cannot be written \(Disk quota exceeded\)\. HINT: XDG_CACHE"
    ):
        cache.made_once("cut", ["a"], lambda aside: aside.touch())


def test_the_file_that_fills_the_disk_at_the_end_of_a_shard_is_removed(tmp_path: Path) -> None:
    """It stayed, hidden, beside the shards, and was open until the process ended."""
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    (tmp_path / f".train-00000.bin.{os.getpid()}").symlink_to("/dev/full")
    files = SplitFiles(tmp_path / "train-00000", masked=False, dtype=np.dtype("<u2"))
    files.add(Document(np.arange(4), None))
    with pytest.raises(OSError, match="No space left"):
        files.finish(9)
    files.close()
    assert not list(tmp_path.glob(".train*"))
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before
