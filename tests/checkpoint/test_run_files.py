"""The files of a run directory in an object store: what is copied, what a copy costs, whose files win."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from fsdp.base.phases import ACTIVITIES, Activity
from fsdp.checkpoint import run_files, run_mirror
from fsdp.checkpoint.full_state import newest_export
from fsdp.checkpoint.object_store import ObjectStore
from fsdp.checkpoint.run_files import WRITER, RunFiles
from fsdp.checkpoint.run_mirror import RunMirror
from fsdp.checkpoint.run_source import opened
from fsdp.checkpoint.store import Buffer
from fsdp.rundir.lock import Lock, Locks
from fsdp.rundir.paths import open_run
from tests.support.processes import eventually


class Counting(ObjectStore):
    """An object store in memory that keeps the names of the objects that are written."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.written: list[str] = []
        self.is_away = False

    def put(self, name: str, buffers: Iterable[Buffer], size: int = 0) -> None:
        if self.is_away:
            raise OSError(110, "writing: it is away")
        self.written.append(name)
        super().put(name, buffers, size)

    def new(self) -> list[str]:
        found, self.written = self.written, []
        return found


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[Counting]:
    import fsspec

    yield Counting(f"memory://{abs(hash(request.node.name)):x}/run")
    fsspec.filesystem("memory").store.clear()


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def texts(folder: Path) -> dict[str, str]:
    return {
        file.relative_to(folder).as_posix(): file.read_text()
        for file in folder.rglob("*")
        if file.is_file() and file.name != run_files.INDEX
    }


FILES = {"config.toml": "a = 1\n", "metrics.jsonl": '{"step": 1}\n', "watch/timing.jsonl": "{}\n", "DONE": ""}


def begun(store: ObjectStore, folder: Path) -> RunFiles:
    files = RunFiles(store, folder)
    files.take_over()
    return files


def test_another_machine_has_the_files_and_not_the_exports(store: Counting, tmp_path: Path) -> None:
    here = begun(store, tmp_path / "here")
    write(here.folder, FILES | {"full_model/full-model.pt": "w", ".staged": "x", "checkpoints/step/a": "c"})
    (here.folder / "link").symlink_to(tmp_path)
    here.upload()
    assert set(store.objects()) == {*FILES, "full_model/full-model.pt", WRITER}
    assert texts(begun(store, tmp_path / "there").folder) == FILES
    with opened(store.where) as source:
        assert texts(source.path) == FILES
    with opened(store.where + "/", export_bytes=1) as source:
        assert texts(source.path) == FILES | {"full_model/full-model.pt": "w"}
        assert source.path.name == "run"
    assert not source.path.exists()


def test_a_file_that_has_grown_costs_its_last_part_and_the_new_ones(
    store: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "PART_BYTES", 10)
    here = begun(store, tmp_path / "here")
    metrics = here.folder / "metrics.jsonl"
    metrics.write_text("0123456789" * 3 + "01")
    store.new()
    here.upload()
    name = "metrics.jsonl"
    assert store.new() == [name, f"{name}.part-0001", f"{name}.part-0002", f"{name}.part-0003"]
    here.upload()
    assert store.new() == []
    with metrics.open("a") as file:
        file.write("2345678901")
    here.upload()
    assert store.new() == [f"{name}.part-0003", f"{name}.part-0004"]
    assert texts(begun(store, tmp_path / "there").folder) == {name: "0123456789" * 4 + "01"}
    here = RunFiles(store, here.folder)  # another start
    metrics.write_text("0123456789" + "abc")
    store.new()
    here.upload()
    assert store.new() == [f"{name}.part-0001"]
    assert texts(begun(store, tmp_path / "third").folder) == {name: "0123456789abc"}


def test_the_folder_that_wrote_last_keeps_its_newer_files(store: Counting, tmp_path: Path) -> None:
    here = begun(store, tmp_path / "here")
    write(here.folder, FILES)
    here.upload()
    write(here.folder, {"metrics.jsonl": "newer\n"})  # killed before the next copy
    assert not RunFiles(store, here.folder).take_over()
    assert texts(here.folder)["metrics.jsonl"] == "newer\n"
    there = begun(store, tmp_path / "there")
    write(there.folder, {"metrics.jsonl": "of another machine\n"})
    there.upload()
    write(here.folder, {"STOPPED": "old"})
    assert RunFiles(store, here.folder).take_over()
    assert texts(here.folder) == FILES | {"metrics.jsonl": "of another machine\n"}


def test_records_that_are_cut_and_grow_again_before_a_copy_are_copied_whole(
    store: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run while the store is away: the file has the same inode and more bytes than before."""
    monkeypatch.setattr(run_files, "PART_BYTES", 10)
    here = begun(store, tmp_path / "here")
    metrics = here.folder / "metrics.jsonl"
    metrics.write_text("a" * 25)
    here.upload()
    again = RunFiles(store, here.folder)
    assert not again.take_over()
    with metrics.open("r+") as file:
        file.truncate(15)
        file.seek(15)
        file.write("b" * 15)
    store.new()
    again.upload()
    assert store.new() == ["metrics.jsonl.part-0001", "metrics.jsonl.part-0002"]
    assert texts(begun(store, tmp_path / "there").folder) == {"metrics.jsonl": "a" * 15 + "b" * 15}


def test_a_deleted_run_leaves_nothing_in_the_folder(store: Counting, tmp_path: Path) -> None:
    here = begun(store, tmp_path / "here")
    write(here.folder, FILES)
    here.upload()
    for name in store.objects():
        store.delete(name)
    assert texts(begun(store, here.folder).folder) == {}


def test_a_marker_that_is_removed_here_is_deleted_there(store: Counting, tmp_path: Path) -> None:
    here = begun(store, tmp_path / "here")
    store.put("FAILED", [b"of another node"])
    write(here.folder, {"STOPPED": "x"})
    here.upload()
    assert set(store.objects()) == {"STOPPED", WRITER}
    (here.folder / "STOPPED").unlink()
    here.upload()
    assert set(store.objects()) == {WRITER}


def test_a_name_that_leads_out_of_the_folder_is_left_out(store: Counting, tmp_path: Path) -> None:
    for name in ("../out", "a/../../out", "a//b", ".bashrc", "watch/.hidden", "CLAIM", "good"):
        store.put(name, [b"x"])
    folder = tmp_path / "deep" / "run"
    assert texts(begun(store, folder).folder) == {"good": "x"}
    assert {file.name for file in tmp_path.rglob("*") if file.is_file()} == {run_files.INDEX, "good"}


def test_a_name_that_no_file_can_have_is_left_out(store: Counting, tmp_path: Path) -> None:
    """One such object of somebody else ended each start on another machine."""
    longest = "界" * 84 + "abc"  # 255 bytes
    for name in ("z" * 256, f"logs/{longest}d", longest, "good"):
        store.put(name, [b"x"])
    assert texts(begun(store, tmp_path / "run").folder) == {"good": "x", longest: "x"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"folder": 3}', '{"folder": ""}'])
def test_an_odd_record_of_the_last_writer_is_another_folders(
    store: Counting, tmp_path: Path, text: str
) -> None:
    folder = begun(store, tmp_path / "here").folder
    store.put(WRITER, [text.encode()])
    (folder / run_files.INDEX).write_text(text)
    assert RunFiles(store, folder).take_over()


def test_a_store_that_is_away_is_named_once_and_copied_to_when_it_is_back(
    store: Counting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "fsdp")
    mirror = RunMirror(Locks(), begun(store, tmp_path / "here"))
    write(tmp_path / "here", FILES)
    store.is_away = True
    assert mirror.before_seal() is None
    mirror.upload()
    assert [line for line in caplog.messages if "it is away: the run continues" in line] == caplog.messages
    assert len(caplog.messages) == 1
    store.is_away = False
    mirror.release()
    assert caplog.messages[1:] == [f"{store.where} is written again"]
    assert set(FILES) <= set(store.objects())


@pytest.mark.parametrize("lost", [False, True], ids=["held", "lost"])
def test_the_records_are_in_the_store_before_a_checkpoint_is_sealed(
    lost: bool, store: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start on another machine has the records of the step that it resumes; a run that lost its lock
    overwrites nothing.
    """
    monkeypatch.setattr(run_mirror, "FIRST_UPLOAD_S", 600.0)
    mirror = RunMirror(Locks(), begun(store, tmp_path / "here"))
    write(tmp_path / "here", FILES)
    monkeypatch.setattr(Locks, "lost_now", lambda locks: "another job has it" if lost else None)
    assert mirror.before_seal() == ("another job has it" if lost else None)
    assert ("metrics.jsonl" in store.objects()) != lost
    monkeypatch.setattr(Locks, "lost", "another job has it" if lost else None)
    mirror.upload()
    mirror.release()
    assert ("metrics.jsonl" in store.objects()) != lost


def test_the_thread_is_no_activity_of_the_run(
    store: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[Activity] = []
    files = begun(store, tmp_path / "here")
    monkeypatch.setattr(run_mirror, "FIRST_UPLOAD_S", 0.0)
    monkeypatch.setattr(ACTIVITIES, "listener", announced.append)
    write(tmp_path / "here", FILES)
    mirror = RunMirror(Locks(), files)
    eventually("a copy", lambda: "DONE" in store.written, 10)
    assert announced == []
    mirror.upload()
    store.objects()
    assert set(announced) == {Activity.STORAGE, Activity.NONE}, "of this thread"
    mirror.release()


def test_files_that_stay_behind_are_named_at_the_end(
    store: Counting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = RunMirror(Locks(), begun(store, tmp_path / "here"))
    write(tmp_path / "here", FILES)
    store.is_away = True
    mirror.release()
    assert f"{store.where} lacks files of this run, which are in {tmp_path / 'here'}" in caplog.text


def test_a_lock_that_cannot_be_read_at_the_end_is_released_and_raises_nothing(
    store: Counting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run's own error, if it has one, stays the one that is shown."""

    class Unread(Lock):
        released = False

        def __init__(self) -> None:
            self.lost = None

        def lost_now(self) -> str | None:
            raise OSError(110, "reading the lock: it is away")

        def release(self) -> None:
            self.released = True

    lock = Unread()
    RunMirror(Locks(lock), begun(store, tmp_path / "here")).release()
    assert lock.released
    assert "reading the lock: it is away" in caplog.text
    assert f"{store.where} lacks files of this run" in caplog.text


def test_one_url_on_two_servers_has_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start deletes what another run has left in its folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("FSSPEC_S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    found = {}
    for server in ("", "http://one:9000", "http://one:9000/", "http://two:9000"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", server)
        found[server] = open_run("s3://bucket/runs/a").path
    assert found["http://one:9000"] == found["http://one:9000/"]
    assert len(set(found.values())) == 3


PARTS = {f"full_model/model-0000{nth}-of-00002.safetensors": f"old {nth}" for nth in (1, 2)}
STARTS = "full_model/model.safetensors.index.json"


def test_a_second_export_that_is_cut_off_leaves_no_index_over_parts_of_both(
    store: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = begun(store, tmp_path / "here")
    write(here.folder, PARTS | {STARTS: "the same"})
    here.upload()
    assert {STARTS, *PARTS} <= set(store.objects())
    write(here.folder, dict.fromkeys(PARTS, "new") | {STARTS: "the same"})
    put = Counting.put

    def once(self: Counting, name: str, buffers: Iterable[Buffer], size: int = 0) -> None:
        put(self, name, buffers, size)
        self.is_away = True

    monkeypatch.setattr(Counting, "put", once)
    with pytest.raises(OSError, match="it is away"):
        here.upload()
    assert STARTS not in store.objects()
    monkeypatch.undo()
    store.is_away = False
    here.upload()
    assert {STARTS, *PARTS} <= set(store.objects())
    assert store.written[-1] == STARTS


def test_files_that_a_new_export_lacks_are_deleted_and_the_newest_format_stays_the_newest(
    store: Counting, tmp_path: Path
) -> None:
    here = begun(store, tmp_path / "here")
    write(here.folder, FILES | PARTS | {STARTS: "{}"})
    here.upload()
    for name in (*PARTS, STARTS):
        (here.folder / name).unlink()
    write(here.folder, {"full_model/model.safetensors": "one file"})
    here.upload()
    ObjectStore(store.where).put("full_model/README.md", [b"a person's own"])
    assert [name for name in store.objects() if "safetensors" in name] == ["full_model/model.safetensors"]
    write(here.folder, {"full_model/full-model.pt": "later"})
    os.utime(here.folder / "full_model/model.safetensors", (1, 1))
    here.upload()
    with opened(store.where) as source:
        source.read(1 << 30)
        newest = newest_export(source.path / "full_model")
        assert newest is not None
        assert newest.name == "full-model.pt"
    assert "full_model/README.md" in store.objects()


def test_an_export_in_another_format_leaves_the_index_that_is_there_older(
    store: Counting, tmp_path: Path
) -> None:
    """The times of objects have whole seconds: one written again beside the new one would be as new."""
    here = begun(store, tmp_path / "here")
    write(here.folder, PARTS | {STARTS: "{}"})
    here.upload()
    store.new()
    write(here.folder, {"full_model/full-model.pt": "later"})
    here.upload()
    assert store.new() == ["full_model/full-model.pt"]
    assert STARTS in store.objects()


@pytest.mark.parametrize(
    "text", ['{"folder": "x", "copied":' + "[" * 100_000, "[]", '{"copied": {"a": 1}}', "\xff"]
)
def test_an_odd_list_of_copies_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / run_files.INDEX).write_text(text)
    assert run_files.Index.read(tmp_path / run_files.INDEX) == run_files.Index()
