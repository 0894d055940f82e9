"""Files that are replaced whole: what is on the disk before the name is, and what a failure leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp.rundir import history


def test_the_bytes_are_synced_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut could otherwise leave a config.toml or a marker of NULs."""
    done, fsync, rename = list[object](), os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        done.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        done.append(target.name)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    history.write_atomically(tmp_path / "config.toml", "seed = 7")
    assert done == [len("seed = 7"), "config.toml"]


def test_a_failure_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.toml"
    history.write_atomically(file, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        history.write_atomically(file, "new")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("config.toml", "old")]
