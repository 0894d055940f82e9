"""Files of a run directory or store are read as data; no tool writes through links (docs/security.md)."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from fsdp.base.errors import ConfigError
from fsdp.base.proc import read_regular
from fsdp.checkpoint import __main__ as checkpoints
from fsdp.checkpoint import inspect, manifest
from fsdp.checkpoint.manifest import MANIFEST, Broken
from fsdp.checkpoint.pretrained import open_full_state
from fsdp.checkpoint.store import LocalStore
from tests.checkpoint.small import save_once
from tests.support.world import run_world

ROOT = Path(__file__).parents[2]
SECRET = "a text of somebody else"

# ---------------------------------------------------------------- links


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    file = tmp_path / "victim"
    file.write_text(SECRET)
    return file


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("saved")
    run_world(1, save_once, "ddp", str(run), 1)
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A run directory with one sealed checkpoint."""
    folder = tmp_path / "run"
    checkpoint = folder / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    for file in (saved / "checkpoints" / "step-00000001").iterdir():
        (checkpoint / file.name).write_bytes(file.read_bytes())
    return folder


def test_an_export_is_not_written_through_a_link(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / "full_model").symlink_to(elsewhere)
    assert checkpoints.main([str(run), "export"]) == 2
    assert list(elsewhere.iterdir()) == []
    hint = capsys.readouterr().err.partition("HINT: ")[2]
    assert hint.startswith(f"--out {elsewhere}")
    assert checkpoints.main([str(run), "export", "--out", str(elsewhere)]) == 0
    assert [file.name for file in elsewhere.iterdir()] == ["full-model.pt"]


# ---------------------------------------------------------------- .metadata, a pickle

ALTERED: dict[tuple[str, str], list[Any]] = {
    ("pathlib", "PosixPath"): [pathlib.PosixPath, pathlib.PurePosixPath],
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"): [MetadataIndex],
    ("torch.distributed.checkpoint.metadata", "Metadata"): [Metadata],
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): [dcp._MEM_FORMAT_ENCODING],
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): [filesystem._StorageInfo],
    ("builtins", "getattr"): [getattr],
    ("torch.serialization", "_get_layout"): [torch.serialization._get_layout],
    ("collections", "OrderedDict"): [OrderedDict, dict],
    ("torch", "Size"): [torch.Size],
    ("torch", "float32"): [torch.float32],
}


@pytest.mark.parametrize("name", ALTERED, ids=".".join)
def test_a_pickle_alters_nothing_that_outlives_it(name: tuple[str, str]) -> None:
    """BUILD sets attributes of whatever lies on the stack: here of the name itself."""
    evil = f"c{name[0]}\n{name[1]}\n".encode() + b"N}S'parts'\n)s\x86b."  # (None, {"parts": ()}), and BUILD
    before = [dict(getattr(one, "__dict__", {})) for one in ALTERED[name]]
    with pytest.raises(Broken):
        manifest.read_metadata(evil)
    after = [dict(getattr(one, "__dict__", {})) for one in ALTERED[name]]
    # or pytest itself could not tell of it
    for one, was, now in zip(ALTERED[name], before, after, strict=True):
        for added in now.keys() - was.keys():
            delattr(one, added)
    assert after == before
    assert Path("a/../b").parts == ("a", "..", "b")


def described(path: Any = "__0_0.distcp", value: bool = False, **changes: Any) -> bytes:
    """`.metadata` of one tensor, or of one value, with its place as given."""
    size = torch.Size([2, 3])
    tensor = dcp.TensorStorageMetadata(
        dcp.TensorProperties(torch.float32), size, [dcp.ChunkStorageMetadata(torch.Size([0, 0]), size)]
    )
    entry, index = (
        (dcp.BytesStorageMetadata(), MetadataIndex("a")) if value else (tensor, MetadataIndex("a", [0, 0]))
    )
    place = filesystem._StorageInfo(path, 0, 100)
    for owner in (tensor, tensor.chunks[0], tensor.properties, place):
        for field, new in changes.items():
            if hasattr(owner, field):
                setattr(owner, field, new)
    return pickle.dumps(Metadata({"a": entry}, {"a": ("a",)}, {index: place}))


def test_metadata_that_another_python_wrote_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.2 pickles the member of an enum as getattr(class, name), others as class(value)."""
    here = manifest.read_metadata(described())

    def by_name(member: Any, protocol: int) -> Any:
        return getattr, (type(member), member.name)

    monkeypatch.setattr(dcp._MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    data = described()
    assert b"getattr" in data
    assert manifest.read_metadata(data) == here


def test_metadata_that_an_older_torch_wrote_is_read() -> None:
    """Up to 2.2 a tensor's properties were of another module, and there was no version."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    saved = pickle.loads(described())
    saved.state_dict_metadata["a"].properties = TensorProperties(dtype=torch.float32)
    for field in ("version", "storage_meta"):
        delattr(saved, field)
    data = pickle.dumps(saved)
    assert b"_shard.sharded_tensor" in data
    assert manifest.read_metadata(data) == manifest.read_metadata(described())


@pytest.mark.parametrize("value", [False, True], ids=["a tensor", "a value"])
@pytest.mark.parametrize("path", ["/etc/passwd", "a/../../x", "a/.."])
def test_a_path_that_leads_out_of_the_checkpoint_is_refused(path: str, value: bool) -> None:
    tensors, values = manifest.read_metadata(described("below/x.distcp", value))
    assert [*tensors, *values] == ["a"]
    with pytest.raises(Broken, match="points outside the checkpoint"):
        manifest.read_metadata(described(path, value))


@pytest.mark.parametrize(
    "changes",
    [
        {"path": 5}, {"offset": -1}, {"length": 1 << 70}, {"size": "ab"}, {"properties": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_metadata_of_another_form_is_broken(changes: dict[str, Any]) -> None:
    with pytest.raises(Broken):
        manifest.read_metadata(described(**changes))


# ---------------------------------------------------------------- the manifest


def resealed(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest with another body and its checksum."""
    body = json.loads((checkpoint / MANIFEST).read_text())["manifest"]
    change(body)
    text = json.dumps(body, sort_keys=True, ensure_ascii=False)
    (checkpoint / MANIFEST).write_text(
        f'{{"crc32": {manifest.crc32(text.encode()):10d}, "manifest":\n{text}}}\n'
    )


@pytest.mark.parametrize("name", ["../../victim", "/etc/passwd", "a/b", ".."])
def test_a_manifest_seals_no_file_outside_its_checkpoint(run: Path, name: str) -> None:
    (run / "victim").write_text(SECRET)
    crc = manifest.crc32(SECRET.encode())
    resealed(
        run / "checkpoints" / "step-00000001", lambda body: body["files"].update({name: [len(SECRET), crc]})
    )
    with pytest.raises(Broken, match="is no name of a file"):
        inspect.examine(LocalStore(run / "checkpoints"), "step-00000001")


# ---------------------------------------------------------------- weights


def safetensors(file: Path, header: Any) -> Path:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 24)
    return file


@pytest.mark.parametrize(
    "about",
    [
        # mapped, and read, beyond the file's end
        {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 1 << 40]},
        {"dtype": "F32", "shape": [2, 3], "data_offsets": [-8, 16]},
        {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [-2, -3], "data_offsets": [0, 24]},
        {"dtype": "X", "shape": [6], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": None, "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [6], "data_offsets": "ab"},
        {}, [], 5,
    ],
    ids=str,
)  # fmt: skip
def test_a_safetensors_header_that_lies_is_refused(tmp_path: Path, about: Any) -> None:
    fits = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    assert open_full_state(safetensors(tmp_path / "good.safetensors", {"a": fits}))["a"].shape == (2, 3)
    with pytest.raises(ConfigError, match="cannot be read"):
        open_full_state(safetensors(tmp_path / "bad.safetensors", {"a": about}))


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_files_are_unpickled_in_known_places_alone() -> None:
    """torch.load with weights_only=True, and a restricted unpickler."""
    found = set()
    for file in [
        *sorted((ROOT / "fsdp").rglob("*.py")),
        *sorted((ROOT / "launch").glob("*.py")),
        ROOT / "train.py",
    ]:
        for name, call in calls(ast.parse(file.read_text(encoding="utf-8"))):
            if name == "torch.load":
                assert any(
                    k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in call.keywords
                ), file
            allowed = [
                k for k in call.keywords if k.arg == "allow_pickle" and ast.unparse(k.value) != "False"
            ]
            assert not allowed, file
            if name in (
                "pickle.load",
                "pickle.loads",
                "pickle.Unpickler",
                "cloudpickle.loads",
                "eval",
                "exec",
            ):
                found.add(f"{file.relative_to(ROOT)}: {name}")
    # a job and its answer, on the pipes of a process that the run itself has started
    tokenizing = "fsdp/tokenize/shards.py: pickle."
    assert found == {f"{tokenizing}load", f"{tokenizing}loads"}


def test_a_file_of_settings_has_a_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_regular(tmp_path / "a", 5) == b"12345"
    with pytest.raises(ValueError, match="more than 4 B"):
        read_regular(tmp_path / "a", 4)


def test_a_header_of_gigabytes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((7 << 30).to_bytes(8, "little"))
    os.truncate(file, 8 << 30)
    with pytest.raises(ConfigError, match="cannot be read"):
        open_full_state(file)
