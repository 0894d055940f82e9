"""One job at a time writes to a store: a folder shared by two run directories, an S3 server."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fsdp.base.errors import CheckpointError, RefusedError
from fsdp.checkpoint import __main__ as checkpoints
from fsdp.checkpoint import inspect
from fsdp.checkpoint.store import LocalStore, ObjectStore, open_store
from fsdp.distributed.env import DistEnv
from fsdp.rundir import lock
from fsdp.rundir.lock import FILE, Folder, Lock, hold, this_holder
from tests.checkpoint import s3_server
from tests.checkpoint.small import build
from tests.support.locks import acquire
from tests.support.runs import on_a_rank
from tests.support.world import run_world

S3 = pytest.param("s3", marks=pytest.mark.needs("s3"))


def save(env: DistEnv, run_dir: str, place: str, steps: int) -> None:
    run = build(env, "ddp", run_dir, section={"dir": place})
    run.checkpointer.restore(run.state)
    for _ in range(steps):
        run.step()
        run.save()
    run.checkpointer.close()


def whole(place: str) -> list[int]:
    return [found.step for found in inspect.scan(open_store(place)) if found.manifest is not None]


# ---- folders


def test_prune_is_refused_while_another_run_writes_in_the_same_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A's run directory is free; its config names the checkpoint folder of B, which is training."""
    run_a, run_b, shared = tmp_path / "a", tmp_path / "b", str(tmp_path / "shared")
    run_world(1, save, str(run_a), shared, 3)
    run_a.mkdir(exist_ok=True)
    (run_a / "config.toml").write_text(f'[checkpoint]\ndir = "{shared}"\nkeep_last = 1\n')
    live = hold(Folder(run_b), Folder(shared), "torchrun")
    try:
        for where in (str(run_a), shared):
            assert checkpoints.main([where, "prune", "--keep-last", "1"]) == 4
            said = capsys.readouterr().err
            assert said.count("\n") == 1
            assert f"{shared} is being written by process {os.getpid()} on" in said
            assert "HINT: " in said
        assert whole(shared) == [3, 2, 1]
    finally:
        live.release()
    assert checkpoints.main([str(run_a), "prune"]) == 0
    assert whole(shared) == [3]
    assert not [path for path in tmp_path.rglob("*") if "CLAIM" in path.name]


def test_a_run_is_refused_a_store_that_another_run_writes(tmp_path: Path) -> None:
    """The other run's store is in its run directory, as by default."""
    store = LocalStore(tmp_path / "a" / "checkpoints")
    live = hold(Folder(tmp_path / "a"), Folder(store.root), "torchrun")
    words = ["--model.name", "mlp", "--data.name", "digits", "--train.steps", "1"]
    words += ["--run.dir", str(tmp_path / "b"), "--checkpoint.dir", str(store.root)]
    (said,) = run_world(1, on_a_rank, words)
    assert said.startswith(f"RefusedError: {tmp_path / 'a'} is being written by process {os.getpid()} on")
    assert "HINT: another --checkpoint.dir, or end that job" in said
    live.release()
    assert run_world(1, on_a_rank, words) == [None]
    assert not (store.root / FILE).exists(), "a run that has ended holds nothing"


def ousted(env: DistEnv, words: list[str]) -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        gone = property(lambda lock: "the lock of this run is gone", lambda lock, value: None)
        patch.setattr(lock.Lock, "lost", gone, raising=False)
        return on_a_rank(env, words)


def test_a_run_that_lost_its_lock_is_refused_further_starts(tmp_path: Path) -> None:
    """Under launch.local and sbatch a run whose folder was renamed began anew in the old place."""
    words = [
        "--model.name",
        "mlp",
        "--data.name",
        "digits",
        "--train.steps",
        "1",
        "--run.dir",
        str(tmp_path / "run"),
    ]
    (said,) = run_world(1, ousted, words)
    assert str(said).startswith("RefusedError: step 1: the lock of this run is gone. HINT: squeue or ps")


# ---- object stores


@pytest.fixture(params=["memory", S3])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A prefix of the test's own, in a store with conditional writes and in one without."""
    import fsspec

    name = "test-" + format(abs(hash(request.node.name)), "x")
    if request.param == "s3":
        server = request.getfixturevalue("server")
        s3_server.use(server, monkeypatch.setenv)
        fsspec.filesystem("s3").mkdir(name)
    yield f"{request.param}://{name}/run"
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()


def remote(place: str) -> ObjectStore:
    store = open_store(place)
    assert isinstance(store, ObjectStore)
    return store


def is_free(store: ObjectStore) -> bool:
    return store.read_small(FILE) is None


def leave(store: ObjectStore, pid: int, where: str) -> None:
    """Leaves the lock of a holder that does not renew it."""
    holder = replace(this_holder("torchrun"), pid=pid, place=where, host="far-away")
    store.write_small(FILE, json.dumps(asdict(holder)).encode())


def test_a_live_holder_on_another_machine_is_known_by_its_renewals(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = remote(place)
    held = acquire(store, "torchrun", beat_s=0.1)
    monkeypatch.setattr(lock, "this_place", lambda: "another machine")
    with pytest.raises(RefusedError, match="is being written by process"):
        acquire(store, "srun", stale_s=30.0)
    assert held.lost is None
    held.release()
    assert is_free(store), "it has been renewed, and is still the holder's to delete"


def test_one_of_several_jobs_takes_over_from_a_silent_holder(place: str) -> None:
    store = remote(place)
    leave(store, 1, "another machine")
    taken: list[Lock] = []
    refused: list[str] = []
    together = threading.Barrier(4)

    def attempt() -> None:
        together.wait()
        try:
            taken.append(acquire(store, "torchrun", stale_s=0.5))
        except RefusedError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=attempt) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [holder] = [held for held in taken if held.lost_now() is None]
    assert len(taken) + len(refused) == 4
    assert "far-away" in holder.took_over
    assert "it gave no sign for 0.5 s" in holder.took_over
    for held in taken:
        held.release()


def save_replaced(env: DistEnv, run_dir: str, place: str, environ: dict[str, str]) -> tuple[str, list[int]]:
    """Another job takes over the store during the step before a save."""
    os.environ.update(environ)
    store = remote(place)
    locks = hold(Folder(run_dir), store, "torchrun")
    run = build(env, "ddp", run_dir, locks=locks, section={"dir": place})
    run.checkpointer.restore(run.state)
    run.step()
    store.write_small(FILE, b'{"nobody": 1}\n')
    said = ""
    try:
        run.save(wait=True)
    except CheckpointError as error:
        said = str(error)
    finally:
        run.checkpointer.close()
        locks.release()
    return said, whole(place)


def test_a_run_whose_store_was_taken_over_seals_nothing(place: str, tmp_path: Path) -> None:
    environ = {name: os.environ[name] for name in (*s3_server.KEYS, "AWS_ENDPOINT_URL") if name in os.environ}
    ((said, left),) = run_world(1, save_replaced, str(tmp_path), place, environ)
    assert f"step 1 was not saved: {place} was taken over by" in said
    assert left == []
