"""Checkpoints on an S3 server: saved, killed, resumed, pruned; a busy server; no keys in messages."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fsdp.base import object_client
from fsdp.base.errors import CheckpointError
from fsdp.base.proc import collection_paused
from fsdp.checkpoint import inspect
from fsdp.checkpoint import store as stores
from fsdp.checkpoint.manifest import MANIFEST, parse_name
from fsdp.checkpoint.save import HEAD
from fsdp.checkpoint.store import ObjectStore, open_store
from fsdp.distributed.env import DistEnv
from tests.checkpoint import s3_server
from tests.checkpoint.small import bits, build
from tests.support.world import WorldError, run_world

pytestmark = pytest.mark.needs("s3")


@pytest.fixture
def bucket(server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of the test's own."""
    import fsspec

    s3_server.use(server, monkeypatch.setenv)
    name = "test-" + format(abs(hash(request.node.name)), "x")
    fsspec.filesystem("s3").mkdir(name)
    return f"s3://{name}"


def train(
    env: DistEnv, url: str, place: str, run_dir: str, section: Mapping[str, Any], steps: int
) -> tuple[int, dict[str, int]]:
    s3_server.use(url)
    run = build(env, "fsdp", run_dir, section={"dir": place, **section})
    found = run.checkpointer.restore(run.state)
    for _ in range(steps):
        run.step()
        run.save()
    run.checkpointer.close()
    assert len(run.checkpointer.sealed()) == steps
    return (found.step if found else 0), bits(run.state)


@pytest.mark.slow
def test_saved_pruned_and_resumed_at_another_size(bucket: str, server: str, tmp_path: Path) -> None:
    place = f"{bucket}/runs/one"
    saved = run_world(2, train, server, place, str(tmp_path), {"keep_last": 2}, 4)
    again = run_world(3, train, server, place, str(tmp_path), {"keep_last": 2}, 0)
    assert again == [(4, saved[0][1])] * 3
    store = open_store(place)
    assert [found.step for found in inspect.scan(store) if found.manifest] == [4, 3]
    assert not [path for path in store._listing("") if ".shared" in path]  # type: ignore[union-attr]


def killed_in_a_save(env: DistEnv, url: str, place: str, run_dir: str) -> None:
    """Rank 0 is killed by SIGKILL before it writes the manifest of step 2."""
    s3_server.use(url)
    run = build(env, "fsdp", run_dir, section={"dir": place})
    run.checkpointer.restore(run.state)
    run.step()
    run.save(wait=True)
    write = ObjectStore.write

    def deadly(self: ObjectStore, folder: str, file: str, buffers: Any) -> None:
        if file == MANIFEST:
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, folder, file, buffers)

    ObjectStore.write = deadly  # type: ignore[method-assign]
    run.step()
    run.save(wait=True)


@pytest.mark.slow
def test_a_save_killed_before_its_seal_is_deleted_and_the_one_before_resumed(
    bucket: str, server: str, tmp_path: Path
) -> None:
    place = f"{bucket}/runs/one"
    with pytest.raises(WorldError):
        run_world(2, killed_in_a_save, server, place, str(tmp_path))
    store = open_store(place)
    assert [name.kind for folder in store.folders() if (name := parse_name(folder))] == ["final", "tmp"]
    assert {step for step, _ in run_world(2, train, server, place, str(tmp_path), {}, 1)} == {1}
    assert [name.kind for folder in store.folders() if (name := parse_name(folder))] == ["final", "final"]


@pytest.mark.slow
@pytest.mark.long
def test_a_damaged_checkpoint_is_marked_and_the_one_before_loaded(
    bucket: str, server: str, tmp_path: Path
) -> None:
    place = f"{bucket}/runs/one"
    run_world(2, train, server, place, str(tmp_path), {}, 2)
    store = open_store(place)
    newest = inspect.finals(store)[0]
    data = bytearray(store.read(newest, "__1_0.distcp"))
    data[HEAD + 1] ^= 1
    store.write(newest, "__1_0.distcp", [bytes(data)])
    assert {step for step, _ in run_world(2, train, server, place, str(tmp_path), {}, 1)} == {1}
    assert f"{newest}.broken-digest" in store.folders()


@pytest.mark.slow
@pytest.mark.long
def test_requests_to_a_busy_server_are_retried(bucket: str, server: str, tmp_path: Path) -> None:
    place = f"{bucket}/runs/one"
    with s3_server.busy_proxy(server, every=4) as (url, refused):
        saved = run_world(2, train, url, place, str(tmp_path), {}, 2)
        again = run_world(2, train, url, place, str(tmp_path), {}, 0)
    assert again == [(2, saved[0][1])] * 2
    assert {request.split()[0] for request in refused} >= {"PUT", "GET"}


REQUESTS: dict[str, Callable[[ObjectStore], object]] = {
    "a write": lambda store: store.write("step-00000001-ab", "x", [b"1"]),
    "a read": lambda store: store.read("step-00000001-ab", "__0_0.distcp"),
    "a listing": lambda store: store.folders(),
    "the lock": lambda store: store.claim("CLAIM", b"x", False),
}


@pytest.mark.parametrize("request_of", REQUESTS)
def test_credentials_that_expire_in_the_run_are_read_anew(
    request_of: str, bucket: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expired: list[str] = []
    with s3_server.expiring_proxy(server, expired) as url:
        s3_server.use(url, monkeypatch.setenv)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-first")
        store = ObjectStore(f"{bucket}/run")
        store.write("step-00000001-ab", "__0_0.distcp", [b"1"])
        expired.append("the-first")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-second")
        REQUESTS[request_of](store)


class Outage:
    """The requests of some kinds that a client fails with, by their number: `upload_part` 2 is the second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **failing: int) -> None:
        import s3fs
        from fsspec.asyn import sync_wrapper

        self.seen: Counter[str] = Counter()
        plain = s3fs.S3FileSystem._call_s3

        async def call(fs: Any, method: str, *args: Any, **more: Any) -> Any:
            self.seen[method] += 1
            if failing.get(method) == self.seen[method]:
                raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            return await plain(fs, method, *args, **more)

        monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call)
        monkeypatch.setattr(s3fs.S3FileSystem, "call_s3", sync_wrapper(call))
        monkeypatch.setattr(object_client, "PAUSES_S", (0.0, 0.0))


def test_an_upload_that_an_outage_cut_off_does_not_replace_the_whole_object(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the upload nor its end succeeds; then a retry writes the object, and garbage is collected."""
    monkeypatch.setattr(stores, "PART_BYTES", 5 << 20)
    outage = Outage(monkeypatch, upload_part=2, abort_multipart_upload=1)
    store, data = ObjectStore(f"{bucket}/run"), os.urandom(12 << 20)
    with collection_paused():
        store.write("step-00000001-ab", "__0_0.distcp", [data])
    assert outage.seen["create_multipart_upload"] == 2
    gc.collect()
    assert store.read("step-00000001-ab", "__0_0.distcp") == data


class Everything(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def speak_of_secrets(env: DistEnv, url: str, place: str, run_dir: str) -> str:
    """The log and the error for a bucket that does not exist."""
    s3_server.use(url)
    heard = Everything()
    logging.getLogger("fsdp").addHandler(heard)
    logging.getLogger("fsdp").setLevel(logging.DEBUG)
    try:
        build(env, "fsdp", run_dir, section={"dir": place})
    except CheckpointError as error:
        return f"{heard.text}{error}"
    finally:
        logging.getLogger("fsdp").removeHandler(heard)
    return ""


@pytest.mark.slow
def test_no_key_is_ever_printed(bucket: str, server: str, tmp_path: Path) -> None:
    said = run_world(
        1,
        speak_of_secrets,
        server,
        "s3://user:do-not-print-me@no-such-bucket/x?token=do-not-print-me",
        str(tmp_path),
    )
    assert "s3://no-such-bucket/x cannot be written" in said[0]
    assert "do-not-print-me" not in said[0]
