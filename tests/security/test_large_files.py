"""A file that is no regular file, or far larger than an honest one, ends in a line: no wait, no memory."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fsdp.base.errors import ConfigError
from fsdp.base.proc import read_regular
from fsdp.checkpoint import __main__ as checkpoints
from fsdp.checkpoint import inspect
from fsdp.checkpoint.manifest import MANIFEST, METADATA
from fsdp.checkpoint.pretrained import open_full_state
from fsdp.checkpoint.store import LocalStore
from fsdp.rundir import history, paths
from fsdp.rundir.paths import RunDir
from tests.checkpoint.small import save_once
from tests.security.test_files import resealed
from tests.support.world import run_world

LARGE = 8 << 30
ENOUGH = 200 << 20
"""Memory for what is not read."""


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < ENOUGH
    finally:
        tracemalloc.stop()


def sparse(file: Path, size: int = LARGE) -> Path:
    """Zeros that take no disk, after what the file has."""
    file.touch()
    os.truncate(file, size)
    return file


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("saved")
    for _ in range(2):
        run_world(1, save_once, "ddp", str(run), 1)
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A run directory with whole checkpoints of steps 1 and 2."""
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


# ---------------------------------------------------------------- no regular file


def test_a_file_of_settings_has_a_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_regular(tmp_path / "a", 5) == b"12345"
    with pytest.raises(ValueError, match="more than 4 B"):
        read_regular(tmp_path / "a", 4)


# ---------------------------------------------------------------- line files


@pytest.fixture
def records(tmp_path: Path) -> RunDir:
    return paths.create(tmp_path / "run")


def test_a_line_without_end_is_one_torn_line(
    records: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(history, "MOST_LINE", 1 << 20)
    lines = [json.dumps({"step": step}) for step in (1, 2)]
    records.metrics.write_text(lines[0] + "\n")
    sparse(records.metrics, 300 << 20)
    with records.metrics.open("a") as file:
        file.write("\n" + lines[1] + "\n")
    with little_memory():
        assert [record["step"] for record in history.read_records(records.metrics)] == [1, 2]
        assert history.last_step(records.metrics) == 2
        history.truncate(records.metrics, 1)
    assert "torn and left out: line 2" in caplog.text
    assert records.metrics.read_text() == lines[0] + "\n"


# ---------------------------------------------------------------- a checkpoint


def test_a_manifest_of_gigabytes_is_not_read(run: Path) -> None:
    sparse(run / "checkpoints" / "step-00000002" / MANIFEST)
    with little_memory():
        found = inspect.listing_of(LocalStore(run / "checkpoints"), "step-00000002")
    assert found.detail == f"its manifest has {LARGE} bytes"


def test_metadata_of_gigabytes_is_not_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = run / "checkpoints" / "step-00000002"
    sparse(checkpoint / METADATA)
    resealed(checkpoint, lambda body: body["files"].update({METADATA: [LARGE, 7]}))
    with little_memory():
        assert checkpoints.main([str(run), "export", "--out", str(run / "out")]) == 4
    said = capsys.readouterr().err
    assert str(checkpoint) in said
    assert "--step N exports one" in said


ODD_FIELDS: dict[str, dict[str, Any]] = {
    "created": {"created": float("-inf")},
    "strategy is not a string of up to": {"strategy": "x" * 100_000},
    "base.digest is not": {"base": {"digest": ["x"], "origin": "", "rank": 1, "alpha": 1.0}},
    "base.origin is not": {"base": {"digest": "0", "origin": "x" * 9999, "rank": 1, "alpha": 1.0}},
    "'surplus' is no field": {"surplus": 1},
}


@pytest.mark.parametrize("what", ODD_FIELDS)
def test_an_odd_field_is_named_in_our_words(run: Path, what: str) -> None:
    resealed(run / "checkpoints" / "step-00000002", lambda body: body.update(ODD_FIELDS[what]))
    found = inspect.listing_of(LocalStore(run / "checkpoints"), "step-00000002")
    assert found.why == "manifest"
    assert what in found.detail
    assert "__init__" not in found.detail
    assert len(found.detail) < 300


@pytest.mark.parametrize("digests", [{"x": [1, "00"]}, {}])
def test_verify_finds_what_an_export_refuses(
    run: Path, digests: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = run / "checkpoints" / "step-00000002"
    resealed(checkpoint, lambda body: body.update(digests=digests))
    assert checkpoints.main([str(run), "verify"]) == 1
    assert "NOT whole: the manifest has no digest of" in capsys.readouterr().out
    assert checkpoints.main([str(run), "export", "--out", str(run / "out")]) == 4
    said = capsys.readouterr().err
    assert f"{checkpoint} cannot be exported: the manifest has no digest of" in said
    assert said.endswith("--step N exports one\n")
    assert checkpoints.main([str(run), "export", "--out", str(run / "out"), "--step", "1"]) == 0


# ---------------------------------------------------------------- weights


def test_a_header_of_gigabytes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((7 << 30).to_bytes(8, "little"))
    sparse(file)
    with little_memory(), pytest.raises(ConfigError, match="cannot be read"):
        open_full_state(file)
