"""A checkpoint that is not whole is never loaded: it is set aside, and the one before it is loaded."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import shlex
import shutil
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp.base.errors import CheckpointError
from fsdp.checkpoint import __main__ as checkpoints
from fsdp.checkpoint import manifest
from fsdp.checkpoint.manifest import MANIFEST, METADATA
from fsdp.checkpoint.save import HEAD
from fsdp.distributed.env import DistEnv
from tests.checkpoint.small import bits, build, save_once
from tests.support.faulty_file import FLIP, Fault, always, faulty, once
from tests.support.marks import quick_are
from tests.support.runs import failures, run
from tests.support.world import run_world

RANKS = 2


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 4, copied by each test."""
    run_dir = tmp_path_factory.mktemp("pristine")
    run_world(RANKS, save_once, "fsdp", str(run_dir), 2)
    run_world(RANKS, save_once, "fsdp", str(run_dir), 2)
    return run_dir


@pytest.fixture
def run_dir(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "run"))


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def restore(env: DistEnv, run_dir: str, section: dict[str, Any]) -> tuple[int | None, list[str], str, int]:
    """The restored step, the log, the error, and a checksum of the state."""
    run, heard = build(env, "fsdp", run_dir, seed=99, section=section), Heard()
    logging.getLogger("fsdp.checkpoint").addHandler(heard)
    try:
        found = run.checkpointer.restore(run.state)
        return (found.step if found else None), heard.lines, "", hash(tuple(sorted(bits(run.state).items())))
    except CheckpointError as error:
        return None, heard.lines, str(error), 0
    finally:
        run.checkpointer.close()
        logging.getLogger("fsdp.checkpoint").removeHandler(heard)


def truncate(folder: Path) -> None:
    file = folder / "__1_0.distcp"
    os.truncate(file, file.stat().st_size - 100)


def flip(offset: int, file: str = "__1_0.distcp") -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = bytearray((folder / file).read_bytes())
        data[offset] ^= 0x10
        (folder / file).write_bytes(data)

    return change


def unseal(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def manifest_of_another_step(folder: Path) -> None:
    shutil.copy(folder.parent / "step-00000002" / MANIFEST, folder / MANIFEST)


def lose_a_file(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def shard_of_another_step(folder: Path) -> None:
    shutil.copy(folder.parent / "step-00000002" / "__1_0.distcp", folder / "__1_0.distcp")


def garble(folder: Path) -> None:
    (folder / METADATA).write_bytes(b"\x80\x05garbage" + (folder / METADATA).read_bytes()[9:])


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, "size"),
    "a bit of a tensor": (flip(HEAD + 1), "digest"),
    "a bit of the manifest": (flip(120, MANIFEST), "manifest"),
    "a bit of the metadata": (flip(200, METADATA), "checksum"),
    "no seal": (unseal, "unsealed"),
    "the manifest of another step": (manifest_of_another_step, "mixed"),
    "a missing file": (lose_a_file, "missing-file"),
    "the shard of another step": (shard_of_another_step, "digest"),
    "garbled metadata": (garble, "checksum"),
}


@pytest.mark.parametrize("damage", quick_are(["truncated", "a bit of a tensor", "no seal"], DAMAGE))
def test_after_a_damaged_newest_checkpoint_the_one_before_is_loaded(run_dir: Path, damage: str) -> None:
    change, why = DAMAGE[damage]
    change(run_dir / "checkpoints" / "step-00000004")
    results = run_world(RANKS, restore, str(run_dir), {})
    assert [step for step, *_ in results] == [2, 2]
    lines = results[0][1]
    assert len(lines) == 1
    assert "CHECKPOINT step-00000004 is NOT whole" in lines[0]
    assert f"step-00000004.broken-{why}" in lines[0]
    assert results[1][1] == [], "one line, not one a rank"
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [
        "step-00000002",
        f"step-00000004.broken-{why}",
    ]


def test_after_a_broken_checkpoint_all_state_is_of_the_one_before(run_dir: Path) -> None:
    """The broken one is read into the state before its checksum is found to differ."""
    shutil.rmtree(run_dir / "checkpoints" / "step-00000004")
    clean = run_world(RANKS, restore, str(run_dir), {})
    run_world(RANKS, save_once, "fsdp", str(run_dir), 2)
    flip(HEAD + 1)(run_dir / "checkpoints" / "step-00000004")
    after = run_world(RANKS, restore, str(run_dir), {})
    assert [(step, total) for step, _, _, total in after] == [(step, total) for step, _, _, total in clean]


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


FAULTS: dict[str, tuple[str, Fault]] = {
    "a disk that cannot be read": ("__1_0.distcp", always("read", errno.EIO)),
    "a stale handle": (MANIFEST, always("open", errno.ESTALE)),
    "a file that is missing once": ("__0_0.distcp", once("open", errno.ENOENT)),
    "a name that is missing once": ("__0_0.distcp", once("stat", errno.ENOENT)),
    "storage that does not answer": ("__1_0.distcp", always("read", errno.ETIMEDOUT)),
}


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_read_that_fails_ends_the_start_and_renames_nothing(run_dir: Path, fault: str) -> None:
    """Each start set whole checkpoints aside, until none was left and the run was blocked."""
    (unbroken, *_) = run_world(RANKS, restore, str(run_dir), {})
    file, how = FAULTS[fault]
    with ExitStack() as mounted:
        for folder in (run_dir / "checkpoints").iterdir():
            mounted.enter_context(faulty(folder / file, how))
        for step, lines, said, _ in run_world(RANKS, restore, str(run_dir), {}):
            assert (step, lines) == (None, [])
            assert "step-00000004 cannot be read" in said
            assert "HINT: start again when the storage answers" in said
    assert names(run_dir) == ["step-00000002", "step-00000004"]
    assert run_world(RANKS, restore, str(run_dir), {})[0] == unbroken


@pytest.mark.needs("fuse")
def test_a_run_started_on_failing_storage_ends_as_the_unbroken_one(tmp_path: Path) -> None:
    words = "--train.steps 6 --checkpoint.every_steps 2"
    unbroken = run(RANKS, tmp_path / "unbroken", words)
    folder = tmp_path / "run"
    assert failures(RANKS, folder, words, "--train.stop_after 4") == [None] * RANKS
    store = folder / "checkpoints"
    with ExitStack() as mounted:
        for one in ("step-00000002", "step-00000004"):
            mounted.enter_context(faulty(store / one / "__1_0.distcp", always("read", errno.EIO)))
        for said in failures(RANKS, folder, words):
            assert str(said).startswith("CheckpointError: ")
    with faulty(store / "step-00000004" / "__0_0.distcp", once("read", FLIP)):
        again = run(RANKS, folder, words)
    assert names(folder) == ["step-00000002", "step-00000004", "step-00000006"]
    assert [one["loss"] for one in again.records] == [one["loss"] for one in unbroken.records]
    assert all(torch.equal(again.parameters[name], value) for name, value in unbroken.parameters.items())


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("file", ["__1_0.distcp", METADATA, MANIFEST])
def test_a_wrong_byte_in_the_page_cache_is_read_again_from_the_disk(run_dir: Path, file: str) -> None:
    """The kernel gives a second read the same wrong byte, until it has forgotten the file."""
    unbroken = run_world(RANKS, restore, str(run_dir), {})
    with faulty(run_dir / "checkpoints" / "step-00000004" / file, once("read", FLIP)):
        assert run_world(RANKS, restore, str(run_dir), {}) == unbroken
    assert unbroken[0][0] == 4
    assert names(run_dir) == ["step-00000002", "step-00000004"]


def test_of_damaged_checkpoints_none_is_set_aside_if_none_is_whole(run_dir: Path) -> None:
    for name in names(run_dir):
        flip(HEAD + 1)(run_dir / "checkpoints" / name)
    for _ in range(2):
        for step, _, said, _ in run_world(RANKS, restore, str(run_dir), {}):
            assert step is None
            assert "is not what was saved: its digest differs" in said
            assert "HINT: --checkpoint.resume PATH" in said
    assert names(run_dir) == ["step-00000002", "step-00000004"]


def test_a_run_whose_checkpoints_were_all_set_aside_is_told_how_to_restore_one(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an earlier version left it: whole ones, and one that is damaged."""
    store = run_dir / "checkpoints"
    flip(HEAD + 1)(store / "step-00000004")
    for name in names(run_dir):
        (store / name).rename(store / f"{name}.broken-unreadable")
    for _, _, said, _ in run_world(RANKS, restore, str(run_dir), {}):
        assert "step-00000004.broken-unreadable: NOT whole: __1_0.distcp" in said
    command = f"mv -T {store}/step-00000002.broken-unreadable {store}/step-00000002"
    assert f"HINT: {command}, then the same command" in said
    assert checkpoints.main([str(run_dir)]) == 0
    assert f"step-00000002.broken-unreadable: whole; {command} restores it\n" in capsys.readouterr().out
    subprocess.run(shlex.split(command), check=True)
    assert [step for step, *_ in run_world(RANKS, restore, str(run_dir), {})] == [2, 2]


def test_resume_never_does_not_write_over_a_run(run_dir: Path) -> None:
    for step, _, said, _ in run_world(RANKS, restore, str(run_dir), {"resume": "never"}):
        assert step is None
        assert "--checkpoint.resume never, but" in said
        assert "holds step-00000004" in said


class Evil:
    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.file}",)


def reseal(folder: Path, metadata: bytes) -> None:
    """Writes this `.metadata`, and a manifest with its checksum."""
    (folder / METADATA).write_bytes(metadata)
    about = manifest.decode((folder / MANIFEST).read_bytes())
    files = {**about.files, METADATA: (len(metadata), manifest.crc32(metadata))}
    (folder / MANIFEST).write_bytes(manifest.encode(manifest.Manifest(**{**vars(about), "files": files})))


@pytest.mark.parametrize("sealed", [True, False])
def test_a_metadata_that_runs_code_is_refused_and_runs_nothing(run_dir: Path, sealed: bool) -> None:
    """Sealed: with a matching manifest. Not sealed: a bare folder that --checkpoint.resume names."""
    folder, proof = run_dir / "checkpoints" / "step-00000004", run_dir / "was-here"
    evil = pickle.dumps({"state_dict_metadata": Evil(str(proof))})
    if sealed:
        reseal(folder, evil)
        results = run_world(RANKS, restore, str(run_dir), {})
        assert [step for step, *_ in results] == [2, 2]
        assert ".metadata names posix.system" in results[0][1][0]
    else:
        (folder / METADATA).write_bytes(evil)
        (folder / MANIFEST).unlink()
        elsewhere = run_dir / "new"
        for step, _, said, _ in run_world(RANKS, restore, str(elsewhere), {"resume": str(folder)}):
            assert step is None
            assert ".metadata names posix.system" in said
    assert not proof.exists()


def test_a_newer_format_is_refused_and_left_alone(run_dir: Path) -> None:
    """It may be whole: it is neither set aside nor passed over for an older one."""
    file = run_dir / "checkpoints" / "step-00000004" / MANIFEST
    body = json.loads(file.read_text())["manifest"]
    text = json.dumps({**body, "format": 4}, sort_keys=True, ensure_ascii=False)
    file.write_text(f'{{"crc32": {manifest.crc32(text.encode()):10d}, "manifest":\n{text}}}\n')
    for step, _, said, _ in run_world(RANKS, restore, str(run_dir), {}):
        assert step is None
        assert "a checkpoint of step 4 has format 4; this program reads format 3" in said
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000004",
    ]


def test_a_checkpoint_of_another_model_is_not_set_aside(run_dir: Path) -> None:
    with pytest.raises(
        AssertionError,
        match=r"is not of this model: its model.embed.weight is \(13, 37\) and this model's \(13, 41\)",
    ):
        run_world(1, restore_wider, str(run_dir))
    assert (run_dir / "checkpoints" / "step-00000004").is_dir()


def restore_wider(env: DistEnv, run_dir: str) -> None:
    run = build(env, "ddp", run_dir, width=41)
    run.checkpointer.restore(run.state)
