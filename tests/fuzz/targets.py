"""What is fuzzed: each target takes drawn values and a folder, and raises if a promise is broken.

The promise: a result or one error of ours, no traceback, and no change outside of the run directory (`run`).
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from fsdp import config as configuration
from fsdp.base.errors import ConfigError, ShardrunError
from fsdp.checkpoint import manifest, metadata
from fsdp.rundir import history, lock, paths
from fsdp.rundir.paths import RunDir
from fsdp.watch import monitor as monitor_module
from fsdp.watch.monitor import Monitor
from fsdp.watch.monitor_links import Head
from fsdp.watch.monitor_options import MonitorOptions
from fsdp.watch.observation import Observation
from launch import slurm_job
from launch.marker import TOKEN
from tests.checkpoint.manifests import a_manifest
from tests.fuzz import inputs
from tests.support.locks import acquire

Check = Callable[..., None]


@dataclass(frozen=True)
class Target:
    """`check(run, **values)` with values of `inputs()`."""

    check: Check
    inputs: Callable[[], dict[str, Any]]
    examples: int
    """In the short form; the long form has FULL times as many."""


FULL = 10


@contextlib.contextmanager
def scratch(place: Path) -> Iterator[RunDir]:
    """An empty run directory; what is around it, and the working directory, must stay as they are."""
    shutil.rmtree(place, ignore_errors=True)
    (place / "cwd").mkdir(parents=True)
    (place / "run").mkdir()
    (place / "outside").write_text("somebody else's")
    before = around(place)
    output, here = io.StringIO(), Path.cwd()
    os.chdir(place / "cwd")
    handler = logging.StreamHandler(output)
    logging.getLogger().addHandler(handler)
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            yield RunDir(place / "run")
    finally:
        logging.getLogger().removeHandler(handler)
        os.chdir(here)
    assert around(place) == before
    assert "Traceback" not in output.getvalue(), output.getvalue()


def around(place: Path) -> dict[str, str]:
    """Everything beside the run directory."""
    found = [path for path in place.rglob("*") if not path.is_relative_to(place / "run")]
    return {str(path): path.read_text() if path.is_file() else "" for path in found}


def is_one_error(error: ShardrunError) -> None:
    """A line for the terminal: our error, with what to do."""
    assert error.exit_code in range(1, 8)
    assert str(error).strip()
    str(error).encode(errors="backslashreplace")


# ---------------------------------------------------------------- flags and recipes


def flags(run: RunDir, words: list[str]) -> None:
    try:
        config = configuration.load(words)
    except ConfigError as error:
        is_one_error(error)
        return
    comes_back(run, config)


def comes_back(run: RunDir, config: configuration.Config) -> None:
    """A run directory keeps it, and `--config RUN/config.toml` is the same, its places absolute."""
    assert configuration.config_hash(config)
    paths.write_config(run, config)
    again = configuration.load(["--config", str(run.config)])
    written = configuration.run_toml(paths.with_absolute_places(config))
    assert configuration.run_toml(again) == written
    assert paths.write_config(run, config) == [] or "nan" in written


def recipe(run: RunDir, text: str) -> None:
    file = run.path / "recipe.toml"
    file.write_bytes(text.encode(errors="surrogateescape" if _escaped(text) else "replace"))
    flags(run, ["--config", str(file)])


def _escaped(text: str) -> bool:
    return all(not 0xD800 <= ord(one) < 0xDC80 and not 0xDD00 <= ord(one) < 0xE000 for one in text)


# ---------------------------------------------------------------- a run directory


def line_files(run: RunDir, metrics: bytes, events: bytes, step: int) -> None:
    run.metrics.write_bytes(metrics)
    run.history.write_bytes(events)
    history.truncate_metrics(run, step)
    assert history.last_step(run) <= max(step, 0)
    left = run.metrics.read_bytes()
    assert len(left) <= len(metrics)
    history.truncate_metrics(run, step)
    assert run.metrics.read_bytes() == left
    history.data_changes(run, {"files": 3})
    count = history.count_starts(run)
    history.append(run.history, {"event": "start", "from_step": step})
    assert history.count_starts(run) == count + 1


def job_script(
    run: RunDir, events: bytes, metrics: bytes, failed: bytes | None, stopped: bytes | None
) -> None:
    run.history.write_bytes(events)
    run.metrics.write_bytes(metrics)
    for path, content in ((run.failed, failed), (run.stopped, stopped)):
        if content is not None:
            path.write_bytes(content)
    with mock.patch.dict(os.environ, {TOKEN: "t"}):
        assert slurm_job.main(["judge", str(run.path), "--job", "7", "--code", "1"]) in range(256)
        assert slurm_job.main(["begin", "--default-run-dir", str(run.path)]) == 0
    assert not run.failed.exists()


def config_of_a_run(run: RunDir, text: bytes) -> None:
    """A start compares and replaces it, a tool reads it."""
    run.config.write_bytes(text)
    run.history.write_bytes(b"")
    try:
        configuration.load_run_config(run.path)
    except ShardrunError as error:
        is_one_error(error)
    paths.write_config(run, configuration.load([]))
    assert run.config.read_text() == configuration.run_toml(configuration.load([]))


def a_config() -> bytes:
    return configuration.run_toml(configuration.load([])).encode()


def lock_file(run: RunDir, text: bytes) -> None:
    (run.path / lock.FILE).write_bytes(text)
    acquire(run.path, "test", stale_s=0.0).release()
    assert list(run.path.iterdir()) == []


# ---------------------------------------------------------------- a checkpoint


def manifest_file(run: RunDir, data: bytes, resealed: bool) -> None:
    text = data.partition(b"\n")[2][:-2]
    sealed = b'{"crc32": %10d, "manifest":\n%s}\n' % (manifest.crc32(text), text)
    try:
        manifest.encode(manifest.decode(sealed if resealed else data))
    except manifest.Broken:
        pass
    except ShardrunError as error:
        is_one_error(error)


def sealed_manifest() -> bytes:
    files, digests = {"__0_0.distcp": (10, 20), ".metadata": (5, 6)}, {"model.w": (4, "ab")}
    made = a_manifest(counters={"step": 3}, metrics={"loss": 0.5}, files=files, digests=digests, bytes=15)
    return manifest.encode(made)


def metadata_file(run: RunDir, data: bytes) -> None:
    with contextlib.suppress(manifest.Broken):
        metadata.read(data)


def a_metadata() -> bytes:
    """As DCP writes it, of one sharded tensor and one value."""
    import pickle

    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    halves = [dcp.ChunkStorageMetadata(torch.Size([at]), torch.Size([2])) for at in (0, 2)]
    tensor = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=torch.float32), torch.Size([4]), halves)
    storage = {
        dcp.MetadataIndex("model.w", torch.Size([at])): _StorageInfo(f"__{rank}_0.distcp", 0, 99)
        for rank, at in enumerate((0, 2))
    }
    return pickle.dumps(dcp.Metadata({"model.w": tensor, "step": dcp.BytesStorageMetadata()}, {}, storage))


# ---------------------------------------------------------------- monitors of two nodes

A_FAILURE = {
    "time": 1.0, "kind": "nan", "message": "step 3 failed", "hint": "lower it", "ranks": [1],
    "secondary": False, "ours": True, "trace": "", "print": "step 3 failed", "code": 5,
}  # fmt: skip
ORDERS = [{"ask": True}, {"keep": "nan-000003"}, {"printed": True}, {"done": True}, {"alive": True}]


def a_report() -> dict[str, Any]:
    """Of node n2 with rank 1."""
    rank = Observation(
        1, "n2", pid=9, stack=(("a.py", 3, "f"),), threads={"t": (("b.py", 4, "g"),)}, failure=A_FAILURE
    )
    seconds = dict.fromkeys((*monitor_module_phases(), "waiting", "starved"), 1.0)
    return json.loads(  # type: ignore[no-any-return]
        json.dumps(
            {"ranks": [rank.encoded()], "step_s": 0.1, "asked": False,
             "steps": {1: {2: 0.1, 3: 0.1}}, "spent": {1: seconds}}
        )
    )  # fmt: skip


def monitor_module_phases() -> tuple[str, ...]:
    from fsdp.base.phases import PHASES

    return tuple(PHASES)


class LocalNode:
    """Stand-in for the ranks of this node: none fails, and nothing is signalled."""

    step_s = 0.1
    all_gone = all_ending = False

    def __init__(self, run: Path) -> None:
        self.run = run
        self.seen = [Observation(0, "n1", still_s=3.0, begun=2, ended=1, op="all_reduce", numel=4)]
        self.kept: list[str] = []
        first = mock.Mock()
        first.status.steps = first.status.step = 3
        self.ranks = [first]

    def steps(self) -> dict[int, Any]:
        return {0: {2: 0.1, 3: 0.1}}

    def spent(self) -> dict[int, Any]:
        return {0: dict.fromkeys((*monitor_module_phases(), "waiting", "starved"), 1.0)}

    def report(self, asked: bool = False) -> dict[str, Any]:
        ranks = [one.encoded() for one in self.seen]
        return {"ranks": ranks, "step_s": 0.1, "steps": self.steps(), "spent": self.spent(), "asked": asked}

    def keep(self, folder: str) -> None:
        self.kept.append(folder)
        place = self.run / "watch" / folder
        assert place.resolve().parent == (self.run / "watch").resolve(), folder

    def ask(self) -> None:
        pass

    def mark_printed(self) -> None:
        pass

    def to_end(self, failed: bool = False) -> list[Any]:
        return []


def a_monitor(run: Path, **more: Any) -> Monitor:
    nodes = {"n1": [0], "n2": [1]}
    options = MonitorOptions(
        "n1", str(run), {}, nodes, hang_s=60.0, late_percent=10.0, token="secret", **more
    )
    monitor = Monitor(options)
    monitor.ranks = LocalNode(run)  # type: ignore[assignment]
    return monitor


def monitor_reports(run: RunDir, first: bytes, messages: list[bytes]) -> None:
    """A head reads a node's reports, judges and writes."""
    ear = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(ear.getsockname()) as peer:
        monitor = a_monitor(run.path, listener=ear.detach())
        assert monitor.head is not None
        send(peer, first)
        received(monitor.head)
        for message in messages:
            send(peer, message)
            monitor.head.exchange()
            now = time.monotonic() + 100
            with mock.patch.object(monitor_module, "print_lines", printable):
                monitor._judge(now)
                monitor._judge(now + 5)
                monitor.timing.update(now, monitor._rank_times, last=True)
        monitor.files.close()
        monitor.head.close()
    written = [path for path in run.path.rglob("*") if path.is_file()]
    assert all(path.parent.parent in (run.path, run.path / "watch") for path in written), written


def send(peer: socket.socket, message: bytes) -> None:
    with contextlib.suppress(OSError):  # the head has closed it
        peer.sendall(message + b"\n")


def received(head: Head) -> None:
    """A loopback connection is accepted and read at once."""
    for _ in range(3):
        head.exchange()


def printable(lines: list[str]) -> None:
    assert all(type(line) is str for line in lines)
    "\n".join(lines).encode(errors="backslashreplace")


def monitor_orders(run: RunDir, messages: list[bytes]) -> None:
    """A node's monitor reads the head's messages."""
    with socket.create_server(("127.0.0.1", 0)) as ear:
        monitor = a_monitor(run.path, head=ear.getsockname())
        assert monitor.peer is not None
        monitor._exchange()
        head, _ = ear.accept()
        with head:
            head.sendall(b"".join(message + b"\n" for message in messages))
            for _ in range(3):
                monitor._exchange()
        monitor.files.close()
        monitor.peer.close()


def messages_of(value: dict[str, Any]) -> Any:
    some = inputs.encoded(inputs.mutated(value))
    return some | some | some | inputs.encoded(inputs.json_values()) | st.binary(max_size=20)


def _orders() -> Any:
    orders = st.sampled_from(ORDERS).flatmap(inputs.mutated) | st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            ("keep", "end", "failed", "ask", "done"), inputs.json_values() | inputs.texts()
        ),
    )
    return st.lists(inputs.encoded(orders), max_size=4)


TARGETS: dict[str, Target] = {
    "flags": Target(flags, lambda: {"words": inputs.command_lines()}, 40),
    "recipe": Target(recipe, lambda: {"text": inputs.recipes()}, 40),
    "line files": Target(
        line_files,
        lambda: {"metrics": inputs.line_files(), "events": inputs.line_files(), "step": st.integers(-1, 9)},
        30,
    ),
    "job script": Target(
        job_script,
        lambda: {
            "events": inputs.line_files(),
            "metrics": inputs.line_files(),
            "failed": inputs.markers(),
            "stopped": st.none() | st.binary(max_size=20),
        },
        15,
    ),
    "config of a run": Target(config_of_a_run, lambda: {"text": inputs.another_part(a_config())}, 30),
    "lock": Target(lock_file, lambda: {"text": inputs.locks()}, 30),
    "manifest": Target(
        manifest_file, lambda: {"data": inputs.another_part(sealed_manifest()), "resealed": st.booleans()}, 60
    ),
    "metadata": Target(metadata_file, lambda: {"data": inputs.another_part(a_metadata())}, 60),
    "monitor reports": Target(
        monitor_reports,
        lambda: {
            "first": st.just(b"secret n2") | messages_of(a_report()),
            "messages": st.lists(messages_of(a_report()), max_size=3),
        },
        20,
    ),
    "monitor orders": Target(monitor_orders, lambda: {"messages": _orders()}, 20),
}
