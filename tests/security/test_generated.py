"""Generated flags, recipes and files of a run directory: a result or one error of ours, no traceback, and no
change outside of the run directory. hypothesis draws and shrinks the inputs, the same at every run.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("hypothesis", reason="hypothesis is not installed (pip install -r requirements.txt)")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from fsdp import config as configuration
from fsdp.base.errors import ConfigError, ShardrunError
from fsdp.checkpoint import manifest
from fsdp.config import FIELDS, trust
from fsdp.config.write import toml_value
from fsdp.rundir import history, lock, paths
from fsdp.rundir.paths import RunDir
from launch import slurm_job
from launch.guard import TOKEN
from launch.policy import Kind
from tests.checkpoint.manifests import a_manifest
from tests.support.locks import acquire

ODD_TEXTS = (
    "", " ", "\0", "nan", "inf", "-1", "1e999", "9" * 5000, "true", "None", "\udcff", "a\nb", "../..", "é",
    "\x7f", "[" * 2000, "{}", "1:2", "step", "x:y", "0", "/dev/zero", "~", "$HOME", "%s", "--",
)  # fmt: skip


def json_values() -> SearchStrategy[Any]:
    """JSON values of every type, with numbers that no double or no step holds."""
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
    return st.recursive(
        scalars | st.just(10**400),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
        max_leaves=5,
    )


def encoded(values: SearchStrategy[Any]) -> SearchStrategy[bytes]:
    return values.map(lambda one: json.dumps(one).encode())


def event_files() -> SearchStrategy[bytes]:
    """history.jsonl and metrics.jsonl: whole lines, ones with a field of any value, any bytes."""
    step = st.integers(-1, 9) | json_values()
    event = {
        "event": st.sampled_from(["start", "end", "crash", "lost", "unmet"]) | json_values(),
        "step": step,
        "from_step": step,
        "job": st.just("7") | json_values(),
        "restart": st.integers(0, 2) | json_values(),
        "code": st.integers(0, 9) | json_values(),
        "kind": st.sampled_from(list(Kind.__members__)) | json_values(),
        "starting": json_values(),
        "data": json_values(),
    }
    line = encoded(st.fixed_dictionaries({}, optional=event))
    odd = st.binary(max_size=30) | st.sampled_from([b"[" * 20_000, bytes(99), b'{"step": 3, "lo'])
    return st.lists(line | line | odd, max_size=12).map(lambda lines: b"\n".join(lines))


def markers() -> SearchStrategy[bytes | None]:
    """FAILED: absent, of the start named t, with any values, any bytes."""
    failed = st.fixed_dictionaries(
        {"start": st.just("t") | json_values(), "code": st.integers(0, 9) | json_values()},
        optional={
            "kind": st.sampled_from(list(Kind.__members__)) | json_values(),
            "message": st.just("an error") | json_values(),
        },
    )
    return st.none() | st.binary(max_size=20) | encoded(failed) | encoded(json_values())


def locks() -> SearchStrategy[bytes]:
    names = ("token", "host", "place", "pid", "born", "launcher", "job", "since")
    whole = st.fixed_dictionaries({}, optional=dict.fromkeys(names, json_values()))
    return st.binary(max_size=40) | encoded(whole | json_values())


def another_part(whole: bytes) -> SearchStrategy[bytes]:
    """A file with a span of it replaced."""
    odd = [
        b"\0",
        b"1e999",
        b'"\\ud800"',
        b"[" * 3000,
        b"]",
        b"\xff",
        b"nan",
        b"{}",
        b"=",
        b"9" * 5000,
        b"\n[x]\n",
    ]
    at = st.integers(0, len(whole))
    between = st.sampled_from(odd) | st.binary(max_size=9)
    return st.tuples(at, at, between).map(lambda cut: whole[: cut[0]] + cut[2] + whole[cut[1] :])


# ---------------------------------------------------------------- flags and recipes


def texts() -> SearchStrategy[str]:
    numbers = (st.integers(-2, 40) | st.integers() | st.floats()).map(str)
    return st.sampled_from(ODD_TEXTS) | numbers | st.text(max_size=8)


def values_of(name: str) -> SearchStrategy[Any]:
    """Values of a field: its default, its names, numbers about it, and what does not fit."""
    spec = FIELDS[name]
    names = [
        str(one) for one in (spec.meta["names"] or getattr(spec.type, "__args__", ())) if isinstance(one, str)
    ]
    return st.one_of(
        st.just(str(spec.default)), *([st.sampled_from(names)] * 2 if names else []), texts(), st.just("true")
    )


def command_lines() -> SearchStrategy[list[str]]:
    """Flags with values, repeated, unknown, without a value, and words that are no flags."""
    known = st.sampled_from(sorted(FIELDS)).flatmap(
        lambda name: values_of(name).map(lambda value: [f"--{name}", value])
    )
    args = st.tuples(
        st.sampled_from(["--model.args.", "--data.args.", "--optim.args."]), st.text(max_size=5), texts()
    )
    more = args.map(lambda one: [f"{one[0]}{one[1]}={one[2]}"])
    odd = st.tuples(st.sampled_from(["--", "-", "--train.", ""]), texts()).map(lambda one: ["".join(one)])
    return st.lists(known | known | known | more | odd, max_size=6).map(
        lambda parts: [word for part in parts for word in part]
    )


def recipes() -> SearchStrategy[str]:
    """TOML: known and unknown sections and fields with values of any type, or any text."""
    by_section: dict[str, list[str]] = {}
    for name in FIELDS:
        section, _, field = name.rpartition(".")
        by_section.setdefault(section, []).append(field)
    value = texts() | st.booleans() | st.integers() | st.floats()
    tables = st.dictionaries(st.text(max_size=6), value, max_size=2)
    any_value = value | st.lists(value | tables, max_size=2) | tables

    def fields(section: str) -> SearchStrategy[tuple[str, Mapping[str, Any]]]:
        key = (
            st.sampled_from(by_section[section]) | st.sampled_from(by_section[section]) | st.text(max_size=6)
        )
        fitting = key.flatmap(
            lambda field: st.tuples(
                st.just(field),
                values_of(f"{section}.{field}") | any_value if f"{section}.{field}" in FIELDS else any_value,
            )
        )
        return st.tuples(st.just(section), st.lists(fitting, max_size=3).map(dict))

    known = st.sampled_from(sorted(section for section in by_section if section)).flatmap(fields)
    written = st.lists(known, max_size=4).map(
        lambda sections: "\n".join(map(_section, dict(sections).items()))
    )
    return written | written | st.text(max_size=40)


def _section(part: tuple[str, Mapping[str, Any]]) -> str:
    lines = [f"{json.dumps(key)} = {toml_value(value)}" for key, value in part[1].items()]
    return "\n".join([f"[{part[0]}]", *lines])


# ---------------------------------------------------------------- the promise


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
    history.truncate(run.metrics, step)
    assert history.last_step(run.metrics) <= max(step, 0)
    left = run.metrics.read_bytes()
    assert len(left) <= len(metrics)
    history.truncate(run.metrics, step)
    assert run.metrics.read_bytes() == left
    history.data_changes(run, {"files": 3})
    count = history.count_starts(run)
    history.append(run.history, {"event": "start", "from_step": step})
    assert history.count_starts(run) == count + 1


def job_script(run: RunDir, events: bytes, metrics: bytes, failed: bytes | None) -> None:
    run.history.write_bytes(events)
    run.metrics.write_bytes(metrics)
    if failed is not None:
        run.failed.write_bytes(failed)
    with mock.patch.dict(os.environ, {TOKEN: "t"}):
        assert slurm_job.main(["judge", str(run.path), "--job", "7", "--code", "1"]) in range(256)
        assert slurm_job.main(["begin", "--", "--run.dir", str(run.path)]) == 0
    assert not run.failed.exists()


def config_of_a_run(run: RunDir, text: bytes) -> None:
    """A start compares and replaces it, a tool reads it."""
    run.config.write_bytes(text)
    run.history.write_bytes(b"")
    try:
        trust.load_run_config(run.path)
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
        manifest.read_metadata(data)


def a_metadata() -> bytes:
    """As DCP writes it, of one sharded tensor and one value."""
    halves = [dcp.ChunkStorageMetadata(torch.Size([at]), torch.Size([2])) for at in (0, 2)]
    tensor = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=torch.float32), torch.Size([4]), halves)
    storage = {
        dcp.MetadataIndex("model.w", torch.Size([at])): _StorageInfo(f"__{rank}_0.distcp", 0, 99)
        for rank, at in enumerate((0, 2))
    }
    return pickle.dumps(dcp.Metadata({"model.w": tensor, "step": dcp.BytesStorageMetadata()}, {}, storage))


# ---------------------------------------------------------------- the tests

INPUTS: dict[str, tuple[Callable[..., None], Callable[[], dict[str, Any]], int]] = {
    "flags": (flags, lambda: {"words": command_lines()}, 40),
    "recipe": (recipe, lambda: {"text": recipes()}, 40),
    "line files": (
        line_files,
        lambda: {"metrics": event_files(), "events": event_files(), "step": st.integers(-1, 9)},
        30,
    ),
    "job script": (
        job_script,
        lambda: {"events": event_files(), "metrics": event_files(), "failed": markers()},
        15,
    ),
    "config of a run": (config_of_a_run, lambda: {"text": another_part(a_config())}, 30),
    "lock": (lock_file, lambda: {"text": locks()}, 30),
    "manifest": (
        manifest_file,
        lambda: {"data": another_part(sealed_manifest()), "resealed": st.booleans()},
        60,
    ),
    "metadata": (metadata_file, lambda: {"data": another_part(a_metadata())}, 60),
}


@pytest.mark.parametrize("name", INPUTS)
def test_any_input_gives_a_result_or_one_error(name: str, tmp_path: Path) -> None:
    check, inputs, examples = INPUTS[name]

    def run(**values: Any) -> None:
        with scratch(tmp_path / "scratch") as folder:
            check(folder, **values)

    rules: Any = settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    rules(given(**inputs())(run))()
