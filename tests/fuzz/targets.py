"""What is fuzzed: each target takes drawn values and a folder, and raises if a promise is broken.

The promise: a result or one error of ours, no traceback, and no change outside of the run directory (`run`).
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
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
}
