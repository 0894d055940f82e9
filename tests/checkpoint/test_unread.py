"""One checkpoint that cannot be read, another user's or of a newer version, among good ones."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest

from fsdp.base.errors import CheckpointError
from fsdp.checkpoint import __main__ as checkpoints
from fsdp.checkpoint import inspect
from fsdp.checkpoint.manifest import MANIFEST, decode, encode
from fsdp.checkpoint.store import LocalStore
from fsdp.config import CheckpointSection
from tests.checkpoint.manifests import a_manifest
from tests.checkpoint.small import build
from tests.checkpoint.test_crashes import ENV

AXES = ("context", "tensor", "expert")
Spoils = Callable[[Path, pytest.MonkeyPatch], None]


def refused(number: int) -> Spoils:
    """The folder cannot be listed."""

    def spoil(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes = LocalStore.sizes

        def listed(self: LocalStore, name: str) -> dict[str, int]:
            if self.root / name == folder:
                raise OSError(number, os.strerror(number), str(folder))
            return sizes(self, name)

        monkeypatch.setattr(LocalStore, "sizes", listed)

    return spoil


def sealed(body: bytes) -> bytes:
    return b'{"crc32": %10d, "manifest":\n%s}\n' % (crc32(body), body)


def newer(folder: Path, _: pytest.MonkeyPatch) -> None:
    body = (folder / MANIFEST).read_bytes().partition(b"\n")[2][:-2]
    (folder / MANIFEST).write_bytes(sealed(body.replace(b'"format": 3', b'"format": 4')))


@pytest.mark.parametrize(("form", "later"), [(2, AXES), (1, (*AXES, "head"))])
def test_a_manifest_of_an_earlier_format_is_read(form: int, later: tuple[str, ...]) -> None:
    manifest = a_manifest(shard=4, ranks=4)
    body = json.loads(encode(manifest).partition(b"\n")[2][:-2]) | {"format": form}
    earlier = json.dumps({name: value for name, value in body.items() if name not in later})
    assert decode(sealed(earlier.encode())) == manifest


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = build(ENV, "ddp", str(tmp_path), section={"keep_last": 0})
    for _ in range(4):
        run.step()
        run.save(wait=True)
    run.checkpointer.close()
    return tmp_path


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (refused(errno.EACCES), "step-00000002 cannot be read: [Errno 13] Permission denied"),
        (refused(errno.ESTALE), "step-00000002 cannot be read: [Errno 116] Stale file handle"),
        (newer, "a checkpoint of step 2 has format 4; this program reads format 3"),
    ],
)
def test_the_others_are_listed_and_pruned(
    spoil: Spoils,
    said: str,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It ended the list, and a run deleted no checkpoint from then on."""
    store = LocalStore(run_dir / "checkpoints")
    spoil(store.root / "step-00000002", monkeypatch)
    for command in ("list", "verify"):
        assert checkpoints.main([str(run_dir), command]) == 1
        lines = capsys.readouterr().out.splitlines()[1:]
        assert [line.split()[0] for line in lines] == ["4", "3", "2", "1"]
        assert ["cannot" in line or "format" in line for line in lines] == [False, False, True, False]
        assert said in lines[2]
    assert checkpoints.main([str(run_dir), "list", "--step", "4"]) == 0
    assert inspect.prune(store, CheckpointSection(keep_last=1), "aaaaaaaa", {}) == [
        "step-00000003",
        "step-00000001",
    ]
    assert said in caplog.text
    assert store.folders() == ["step-00000002", "step-00000004"]


def test_a_newest_one_that_cannot_be_read_is_not_replaced_by_an_older_one(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_dir / "checkpoints/step-00000004"
    refused(errno.EACCES)(folder, monkeypatch)
    assert checkpoints.main([str(run_dir), "export"]) == 4
    assert capsys.readouterr().err.endswith(f"HINT: ls -ld {folder} shows who may read it\n")
    with pytest.raises(CheckpointError, match="cannot be read"):
        inspect.newest_whole(LocalStore(run_dir / "checkpoints"))
