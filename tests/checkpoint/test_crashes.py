"""A sealed checkpoint survives a power cut at any moment of a run that saves and prunes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp.checkpoint import inspect
from fsdp.checkpoint.manifest import MANIFEST, Broken, parse_name, staging_name
from fsdp.checkpoint.sealing import Sealing
from fsdp.checkpoint.store import LocalStore
from tests.checkpoint.crashes import Change, Left, Recorder, Tree, states
from tests.checkpoint.small import build
from tests.support.env import env_of

ENV = env_of()


def record(folder: Path, forgets: Callable[[Change], bool] = lambda change: False) -> Recorder:
    """Two starts of a run that keeps two: four saves, two prunings, a killed save, its sweep, two saves."""
    with Recorder(folder / "checkpoints", forgets) as recorder, pytest.MonkeyPatch.context() as patch:
        seal = LocalStore.seal

        def noting(self: LocalStore, staged: str, final: str) -> None:
            seal(self, staged, final)
            recorder.note(final)

        patch.setattr(LocalStore, "seal", noting)
        for saves in (4, 2):
            run = build(ENV, "ddp", str(folder), section={"keep_last": 2})
            run.checkpointer.restore(run.state)
            for _ in range(saves):
                run.step()
                run.save(wait=True)
            run.checkpointer.close()
            store = LocalStore(folder / "checkpoints")
            store.begin(staging_name(9, "deadbeef"))  # killed in a later save
            store.write(staging_name(9, "deadbeef"), "__0_0.distcp", [b"half"])
    return recorder


def wrong(tree: Tree, sealed: int, deleting: set[str]) -> str:
    """The guarantee that a state violates; empty if none."""
    store: Any = Left(tree)
    founds = inspect.scan(store)
    whole = [found for found in founds if found.manifest is not None and not _damage(store, found)]
    if max((found.step for found in whole), default=0) < sealed:
        return f"the newest whole one is {[found.step for found in whole][:1]} and step {sealed} was sealed"
    for found in founds:
        if found not in whole and found.folder not in deleting:
            return (
                f"{found.folder} has its final name and is not whole: {found.detail or 'a checksum differs'}"
            )
    for folder in store.folders():
        going = (name := parse_name(folder)) is not None and name.kind == "gone"
        if going and MANIFEST in tree[folder] and _damage(store, inspect.listing_of(store, folder)):
            return f"{folder} is sealed and in parts"
    return ""


def _damage(store: Any, found: inspect.CheckpointListing) -> bool:
    if found.manifest is None:
        return True
    try:
        for file, (size, crc) in found.manifest.files.items():
            inspect.check_file(store, found.folder, file, size, crc)
    except Broken:
        return True
    return False


def violations(recorder: Recorder) -> tuple[int, list[str]]:
    """The number of states, and the violation in each state that has one."""
    count, found = 0, []
    for done, tree in states(recorder):
        count += 1
        names = [parse_name(text) for at, text in recorder.notes if at <= done]
        sealed = max((name.step for name in names if name is not None), default=0)
        if said := wrong(tree, sealed, _deleting(recorder.changes[:done])):
            found.append(f"after {done} operations: {said}")
    return count, found


def _deleting(changes: list[Change]) -> set[str]:
    """Folders in deletion: one of their files is deleted, or they are renamed."""
    begun = set()
    for change in changes:
        if change.kind == "names" and change.leaves:
            begun |= {change.leaves, Path(change.path).parent.name}
    return begun


def test_no_crash_loses_what_was_sealed(tmp_path: Path) -> None:
    recorder = record(tmp_path)
    count, found = violations(recorder)
    print(f"{len(recorder.changes)} operations, {count} states after a crash, {len(found)} wrong")
    assert [text for _, text in recorder.notes] == [f"step-{step:08d}" for step in range(1, 7)]
    assert count > 500
    assert not found, found[:3]


def test_the_folders_above_a_first_checkpoint_survive_a_power_cut(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        LocalStore(tmp_path / "runs" / "a" / "checkpoints").begin("step-00000001.tmp-00000000")
    made = [(at, one) for at, one in enumerate(recorder.changes) if one.kind == "names"]
    assert [one.comes for _, one in made] == ["runs", "a", "checkpoints", "step-00000001.tmp-00000000"]
    for at, one in made[:-1]:  # the seal syncs the last
        assert any(later.kind == "fsync" and later.node is one.node for later in recorder.changes[at:]), one


# ---- the simulator finds each of these


def no_fsync_of(what: str, root: str = "/checkpoints") -> Callable[[Change], bool]:
    """Leaves out the fsyncs of files, of staged folders, or of the folder of checkpoints, `root`."""

    def forgets(change: Change) -> bool:
        if change.kind != "fsync" or root not in change.path:
            return False
        top = "/" not in change.path.rpartition(root)[2]
        kind = "root" if top else "folder" if change.node.folder else "file"
        return kind == what

    return forgets


@pytest.mark.long
@pytest.mark.parametrize("what", ["file", "folder", "root"])
def test_a_missing_fsync_is_found(tmp_path: Path, what: str) -> None:
    assert violations(record(tmp_path, no_fsync_of(what)))[1]


def delete_sealed(patch: pytest.MonkeyPatch) -> None:
    """Deletes files before the manifest."""
    unlink = Path.unlink

    def spared(self: Path, missing_ok: bool = False) -> None:
        if self.name != MANIFEST:
            unlink(self, missing_ok)

    patch.setattr(Path, "unlink", spared)


def prune_first(patch: pytest.MonkeyPatch) -> None:
    """Deletes the older ones while the new one is staged."""
    seal = Sealing._seal

    def late(self: Sealing, *args: Any) -> Any:
        for old in inspect.finals(self.store):
            self.store.remove(old, "00000000")
        return seal(self, *args)

    patch.setattr(Sealing, "_seal", late)


@pytest.mark.parametrize("fault", [delete_sealed, prune_first], ids=lambda fault: fault.__name__)
def test_a_wrong_order_is_found(tmp_path: Path, fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        recorder = record(tmp_path)
    assert violations(recorder)[1]
