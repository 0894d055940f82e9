"""Files that are replaced whole: what is on the disk before the name is, and what a failure leaves."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fsdp.base.errors import ConfigError
from fsdp.rundir import paths


def test_the_bytes_are_synced_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut could otherwise leave a config.toml or a marker of NULs."""
    done, fsync, rename = list[object](), os.fsync, paths.rename

    def synced(descriptor: int) -> None:
        done.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        done.append(target.name)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(paths, "rename", renamed)
    paths.write_atomically(tmp_path / "config.toml", "seed = 7")
    assert done == [len("seed = 7"), "config.toml"]


def test_a_failure_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.toml"
    paths.write_atomically(file, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        paths.write_atomically(file, "new")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("config.toml", "old")]


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (
            errno.EROFS,
            "findmnt -T {0}/a.jsonl shows the mount: make it writable; --run.dir runs/NAME is another place",
        ),
        (errno.EIO, "ls -ld {0}/a.jsonl shows who may write there; --run.dir runs/NAME is another place"),
    ],
)
def test_a_file_that_a_start_cannot_write_has_the_hint_of_its_error(
    number: int, hint: str, tmp_path: Path
) -> None:
    """The folder's owner and rights, which the line asked for, show none of these."""
    file = tmp_path / "a.jsonl"
    file.touch()
    with pytest.raises(ConfigError) as found, paths.writing(file):
        raise OSError(number, os.strerror(number), str(file))
    said = f"{file} cannot be written ({os.strerror(number)}). HINT: {hint.format(tmp_path)}"
    assert str(found.value) == said
