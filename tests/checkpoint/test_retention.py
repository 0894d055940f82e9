"""Retention: the checkpoints that stay; old ones are deleted after the new one is sealed."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from fsdp.base.errors import CheckpointError
from fsdp.checkpoint import inspect
from fsdp.checkpoint import store as local_store
from fsdp.checkpoint.inspect import CheckpointListing, superfluous
from fsdp.checkpoint.manifest import MANIFEST, METADATA
from fsdp.checkpoint.sealing import Sealing
from fsdp.checkpoint.store import LocalStore
from fsdp.config import CheckpointSection
from fsdp.distributed.collectives import ObjectGroup
from fsdp.distributed.env import DistEnv
from fsdp.rundir.lock import FILE
from tests.checkpoint.manifests import a_manifest
from tests.checkpoint.small import build
from tests.checkpoint.test_crashes import ENV
from tests.support.locks import acquire
from tests.support.world import run_world


def whole(step: int, **metrics: float) -> CheckpointListing:
    return CheckpointListing(f"step-{step}", step, a_manifest(step=step, metrics=metrics))


LOSSES = {1: 5.0, 2: 3.0, 3: 4.0, 4: 2.0, 5: 9.0, 6: 8.0}


@pytest.mark.parametrize(
    ("rules", "stay"),
    [
        ({"keep_last": 2}, [5, 6]),
        ({"keep_last": 0}, [1, 2, 3, 4, 5, 6]),
        ({"keep_last": 1, "keep_every_steps": 3}, [3, 6]),
        ({"keep_last": 1, "keep_best": 2}, [2, 4, 6]),
        ({"keep_last": 1, "keep_best": 1, "keep_best_metric": "-eval_loss"}, [5, 6]),
        ({"keep_last": 1, "keep_best": 3, "keep_best_metric": "accuracy"}, [6]),
        ({"keep_last": 1, "keep_best": 1, "keep_every_steps": 5}, [4, 5, 6]),
    ],
)
def test_the_rules_add_up(rules: dict[str, Any], stay: list[int]) -> None:
    founds = [whole(step, eval_loss=loss) for step, loss in LOSSES.items()]
    gone = {found.step for found in superfluous(CheckpointSection(**rules), founds)}
    assert [step for step in LOSSES if step not in gone] == stay


def test_of_equal_metrics_the_newest_is_the_best() -> None:
    founds = [whole(step, eval_loss=1.0) for step in (1, 2, 3)]
    gone = superfluous(CheckpointSection(keep_last=1, keep_best=2), founds)
    assert [found.step for found in gone] == [1]


def test_a_file_whose_checksum_differs_is_broken(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "part").write_bytes(b"written")
    with pytest.raises(inspect.Broken, match="part is not what was written"):
        inspect.check_file(LocalStore(tmp_path), "step", "part", 7, crc32(b"another"))
    inspect.check_file(LocalStore(tmp_path), "step", "part", 7, crc32(b"written"))


def test_an_attempt_that_has_lost_its_lock_does_not_seal(tmp_path: Path) -> None:
    store, answers = LocalStore(tmp_path), iter([None, "another job has it"])
    sealing = Sealing(store, ObjectGroup(), "0" * 8, lambda: next(answers), lambda _: None, leads=True)
    outcome = sealing.run(3, lambda folder: b"", lambda folder, reports: (b"", 0))
    assert outcome.fatal
    assert inspect.finals(store) == []


def test_the_position_of_the_data_is_restored(tmp_path: Path) -> None:
    run = build(ENV, "ddp", str(tmp_path))
    run.state.data = {"streams": [7]}
    run.step()
    run.save()
    run.checkpointer.close()
    again = build(ENV, "ddp", str(tmp_path))
    again.checkpointer.restore(again.state)
    again.checkpointer.close()
    assert again.state.data == {"streams": [7]}


def save_all(env: DistEnv, run_dir: str, section: dict[str, Any], steps: int) -> None:
    run = build(env, "fsdp", run_dir, section=section)
    run.checkpointer.restore(run.state)
    for _ in range(steps):
        run.step()
        run.save(metrics={"eval_loss": LOSSES[run.state.step]})
    run.checkpointer.close()


def steps(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_only_whole_checkpoints_count_and_others_are_left(tmp_path: Path) -> None:
    run_world(2, save_all, str(tmp_path), {"keep_last": 3}, 3)
    (tmp_path / "checkpoints" / "step-00000003" / "__1_0.distcp").write_bytes(b"")
    run_world(2, save_all, str(tmp_path), {"keep_last": 2}, 2)
    # Resumed from 2, since 3 is broken; 3 and 4 are new, and the broken 3 counts for neither.
    assert steps(tmp_path) == ["step-00000003", "step-00000003.broken-size", "step-00000004"]


def test_the_next_attempt_deletes_unfinished_checkpoints(tmp_path: Path) -> None:
    run_world(2, save_all, str(tmp_path), {}, 1)
    for name in ("step-00000002.tmp-deadbeef", "step-00000001.gone-deadbeefabc"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "checkpoints" / "somebody-elses").mkdir()
    run_world(2, save_all, str(tmp_path), {}, 0)
    assert steps(tmp_path) == ["somebody-elses", "step-00000001"]


def test_neither_a_save_nor_a_start_reads_all_checkpoints_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand of 512 ranks are half a million files to look at."""
    reads: list[str] = []
    plain = LocalStore.read

    def counted(self: LocalStore, folder: str, file: str) -> bytes:
        reads.append(file)
        return plain(self, folder, file)

    monkeypatch.setattr(LocalStore, "read", counted)
    section = {"keep_last": 1, "keep_every_steps": 1}
    run, counts = build(ENV, "ddp", str(tmp_path), section=section), []
    for _ in range(6):
        run.step()
        reads.clear()
        run.save(wait=True)
        counts.append(reads.count(MANIFEST))
    run.checkpointer.close()
    assert counts == [1] * 6
    again = build(ENV, "ddp", str(tmp_path), section=section)
    reads.clear()
    again.checkpointer.restore(again.state)
    again.checkpointer.close()
    assert (again.state.step, reads.count(MANIFEST)) == (6, 1)


def test_a_save_whose_seal_may_have_happened_is_called_uncertain_and_prunes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fsync of the folder fails after the rename: the next start may resume from it."""
    run = build(ENV, "ddp", str(tmp_path), section={"keep_last": 1})
    run.step()
    run.save(wait=True)
    sync_folder = local_store.sync_folder

    def failing(folder: Path) -> None:
        if (folder / "step-00000002").exists():
            raise OSError(errno.EIO, "Input/output error", str(folder))
        sync_folder(folder)

    monkeypatch.setattr(local_store, "sync_folder", failing)
    run.step()
    with pytest.raises(CheckpointError, match=r"step 2 may not be saved: rank 0: .*EIO"):
        run.save(wait=True)
    run.checkpointer.close()
    assert steps(tmp_path) == ["step-00000001", "step-00000002"]


def save_ousted(env: DistEnv, run_dir: str, when: str) -> str:
    """Another job takes over the run directory while files are written, or after the seal."""
    lock = acquire(Path(run_dir), "torchrun") if env.is_main else None
    run = build(env, "fsdp", run_dir, locks=lock, section={"keep_last": 1})
    run.checkpointer.restore(run.state)
    run.step()
    run.save(wait=True)
    run.step()
    write, seal = LocalStore.write, LocalStore.seal

    def oust() -> None:
        if lock is not None:
            file = Path(run_dir, FILE)
            file.write_text(file.read_text().replace(lock._holder.token, "1234"))

    def ousting_write(self: LocalStore, folder: str, file: str, buffers: Any) -> None:
        write(self, folder, file, buffers)
        if file == METADATA:
            oust()

    def ousting_seal(self: LocalStore, staged: str, final: str) -> None:
        seal(self, staged, final)
        oust()

    if when == "writing":
        LocalStore.write = ousting_write  # type: ignore[method-assign]
    else:
        LocalStore.seal = ousting_seal  # type: ignore[method-assign]
    try:
        run.save(wait=True)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        LocalStore.write, LocalStore.seal = write, seal  # type: ignore[method-assign]
        run.checkpointer.close()
        if lock is not None:
            lock.release()
    return "sealed"


def test_a_writer_that_lost_its_lock_seals_nothing_and_stops(tmp_path: Path) -> None:
    for said in run_world(2, save_ousted, str(tmp_path), "writing"):
        assert said.startswith("RefusedError: "), "no launcher starts it again"
        assert "was taken over by process" in said
    # What it was writing is the next holder's to sweep: its own deletion could meet the other's.
    assert [name for name in steps(tmp_path) if ".tmp-" not in name] == ["step-00000001"]


def test_a_writer_that_lost_its_lock_prunes_nothing(tmp_path: Path) -> None:
    assert run_world(2, save_ousted, str(tmp_path), "sealed") == ["sealed", "sealed"]
    assert steps(tmp_path) == ["step-00000001", "step-00000002"]


def save_apart(env: DistEnv, run_dir: str) -> str:
    try:
        build(env, "fsdp", str(Path(run_dir, str(env.rank))))
    except CheckpointError as error:
        return str(error)
    return "built"


def test_storage_that_is_not_shared_is_named_before_training(tmp_path: Path) -> None:
    for said in run_world(3, save_apart, str(tmp_path)):
        assert "is not shared: rank 1 on" in said
        assert ", rank 2 on" in said
