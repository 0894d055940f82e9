"""Export and import of a model as one state dict, and the command `python -m fsdp.checkpoint`."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fsdp.base.errors import ConfigError
from fsdp.checkpoint import __main__ as checkpoints
from fsdp.checkpoint import export as export_module
from fsdp.checkpoint import inspect, manifest
from fsdp.checkpoint.export import export
from fsdp.checkpoint.manifest import MANIFEST
from fsdp.checkpoint.pretrained import TORCH_FILE, open_full_state
from fsdp.checkpoint.save import HEAD
from fsdp.distributed.env import DistEnv
from tests.checkpoint.small import Model, build, save_once
from tests.support.world import run_world

ROOT = Path(__file__).parents[2]


def save_and_export(env: DistEnv, run_dir: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    run = build(env, "fsdp", run_dir, section={"export_format": "both"})
    run.step()
    run.save(wait=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdp.checkpoint.export.SHARD_GIB", 4e-6)
        files = run.checkpointer.export(Path(run_dir, "full_model"))
    run.checkpointer.close()
    whole = {
        name: getattr(one, "full_tensor", lambda one=one: one)()
        for name, one in run.state.model.state_dict().items()
    }
    return {name: tensor.clone() for name, tensor in whole.items()}, sorted(file.name for file in files)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    run_dir = tmp_path_factory.mktemp("export")
    (whole, files), (_, others) = run_world(2, save_and_export, str(run_dir))
    assert files == others
    assert files == sorted(file.name for file in (run_dir / "full_model").iterdir())
    return run_dir, whole


def same(found: object, whole: dict[str, torch.Tensor]) -> None:
    assert isinstance(found, dict)
    assert set(found) == set(whole)
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_torch_loads_the_export_and_tied_weights_stay_tied(
    exported: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    run_dir, whole = exported
    found = torch.load(run_dir / "full_model/full-model.pt", weights_only=True)
    same(found, whole)
    assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()
    Model().load_state_dict(found)
    same(torch.load(run_dir / "full_model/full-model.pt", weights_only=True, mmap=True), whole)


def test_of_two_exports_in_one_folder_the_newest_is_read(tmp_path: Path) -> None:
    index, whole = tmp_path / "model.safetensors.index.json", tmp_path / "full-model.pt"
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    torch.save({"a": torch.full((2,), 5.0)}, whole)
    for newest, value in ((whole, 5.0), (index, 1.0)):
        for nth, file in enumerate(sorted((index, whole), key=lambda file: file == newest)):
            os.utime(file, (nth, nth))
        assert open_full_state(tmp_path)["a"].tolist() == [value] * 2


@pytest.mark.parametrize("what", ["full_model", "full_model/full-model.pt", ""])
def test_a_full_state_is_read_lazily_by_name(
    exported: tuple[Path, dict[str, torch.Tensor]], what: str
) -> None:
    run_dir, whole = exported
    found = open_full_state(run_dir / what)
    assert set(found) == set(whole)
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert found.get("nothing") is None


@pytest.mark.parametrize("wrapping", ["module.", "_orig_mod."])
def test_names_of_wrapped_models_are_cleaned(tmp_path: Path, wrapping: str) -> None:
    torch.save({"state_dict": {f"{wrapping}a.weight": torch.ones(2)}}, tmp_path / "a.pt")
    assert list(open_full_state(tmp_path / "a.pt")) == ["a.weight"]


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"not a file of torch", "cannot be read"), (None, "No such file"), ([1], "cannot be read")],
)
def test_a_file_that_is_no_state_dict_is_named(tmp_path: Path, content: object, said: str) -> None:
    file = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    with pytest.raises(ConfigError, match=said):
        open_full_state(file)


def sources(folder: Path) -> list[inspect.CheckpointSource]:
    """The checkpoints of a run at steps 1 and 2, opened."""
    run_world(2, save_once, "fsdp", str(folder), 1)
    run_world(2, save_once, "fsdp", str(folder), 1)
    store = checkpoints.open_store(str(folder / "checkpoints"))
    found = []
    for name in ("step-00000001", "step-00000002"):
        found.append(inspect.open_source(store, name, manifest.decode(store.read(name, MANIFEST))))
    return found


def killed(export: Callable[[], object], at: int) -> bool:
    """Runs an export in a process that is killed before its `at`-th rename or deletion; False if it ended."""
    child = os.fork()
    if not child:
        counter = itertools.count()

        def deadly(act: Callable[..., None]) -> Callable[..., None]:
            def call(*args: Any, **more: Any) -> None:
                if next(counter) == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                act(*args, **more)

            return call

        for name in ("rename", "unlink"):
            setattr(Path, name, deadly(getattr(Path, name)))
        try:
            export()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.long
@pytest.mark.slow
def test_a_second_export_that_is_killed_leaves_the_old_one_the_new_one_or_a_refusal(tmp_path: Path) -> None:
    """In several files; wherever it is killed, and the export after it deletes what it left."""
    old, new = sources(tmp_path)
    out, first = tmp_path / "full_model", tmp_path / "first"
    export(new, first, "safetensors", 4e-6)
    export(old, out, "safetensors", 4e-6)
    names, values = sorted(file.name for file in out.iterdir()), Counter[str]()
    wholes = {}
    for step, place in (("old", out), ("new", first)):
        found = open_full_state(place)
        wholes[step] = {name: found[name].clone() for name in found}
    assert len(names) > 3
    for at in itertools.count():
        export(old, out, "safetensors", 4e-6)
        assert sorted(file.name for file in out.iterdir()) == names
        if not killed(partial(export, new, out, "safetensors", 4e-6), at):
            break
        values[outcome(out, wholes)] += 1
    assert values.keys() == {"old", "refused", "new"}, values
    assert outcome(out, wholes) == "new"
    assert sorted(file.name for file in out.iterdir()) == names


def outcome(place: Path, wholes: dict[str, dict[str, torch.Tensor]]) -> str:
    """Which export --model.weights reads."""
    try:
        found = open_full_state(place)
    except ConfigError as error:
        refused = str(error).startswith(f"--model.weights {place} holds no") and "HINT" in str(error)
        return "refused" if refused else str(error)
    for step, whole in wholes.items():
        if all(torch.equal(found[name], whole[name]) for name in whole):
            return step
    return "mixed"


def test_a_full_disk_leaves_the_old_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = sources(tmp_path)
    out = tmp_path / "full_model"
    export(old, out, "safetensors", 4e-6)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    write, written = export_module.write_safetensors, list[object]()

    def full(file: Path, **more: Any) -> None:
        written.append(write(file, **more))
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export_module, "write_safetensors", full)
    with pytest.raises(OSError, match="No space left"):
        export(new, out, "safetensors", 4e-6)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


# ---------------------------------------------------------------- python -m fsdp.checkpoint


def command(*words: object) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "fsdp.checkpoint.__main__", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for _ in range(3):
        run_world(2, save_once, "fsdp", str(tmp_path), 1)
    return tmp_path


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[HEAD + 1] ^= 1
    file.write_bytes(data)


@pytest.mark.slow
def test_the_list_shows_which_checkpoints_are_whole(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "checkpoints/step-00000001" / MANIFEST).unlink()
    flip(run_dir / "checkpoints/step-00000002/__1_0.distcp")
    code, said = command(run_dir, "verify")
    assert code == 1
    lines = said.splitlines()
    assert lines[0].split() == ["step", "age", "size", "mesh", "ranks", "state"]
    assert lines[1].split()[0] == "3"
    assert "fsdp 1×2" in lines[1]
    assert lines[1].endswith("verified")
    assert lines[2].endswith("NOT whole: __1_0.distcp is not what was written: its checksum differs")
    assert "NOT whole: it has no manifest" in lines[3]
    # Sizes alone cannot see the flip, and the listing does not claim more than it has looked at.
    assert checkpoints.main([str(run_dir), "--step", "2"]) == 0
    assert "sizes match; verify reads every byte" in capsys.readouterr().out


def test_verify_and_prune(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoints.main([str(run_dir), "verify"]) == 0
    assert checkpoints.main([str(run_dir), "prune", "--keep-last", "1"]) == 0
    assert "deleted step-00000002, step-00000001" in capsys.readouterr().out
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000003"]


def test_export_by_command_takes_the_step_asked_for(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(run_dir), "export", "--format", "both", "--step", "2", "--out", str(run_dir / "out")]
    assert checkpoints.main(words) == 0
    assert capsys.readouterr().out.count("\n") == 3
    assert set(open_full_state(run_dir / "out")) == set(
        torch.load(run_dir / "out" / TORCH_FILE, weights_only=True)
    )


def test_an_export_of_a_damaged_checkpoint_fails_and_leaves_no_file(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(run_dir / "checkpoints/step-00000003/__1_0.distcp")
    assert checkpoints.main([str(run_dir), "export"]) == 4
    assert "is not what was saved: its digest differs" in capsys.readouterr().err
    assert list((run_dir / "full_model").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["/nowhere"], 4, "/nowhere is no folder"),
        (["RUN", "lst"], 2, "lst is not one of list, verify, prune, export"),
        (["RUN", "--keep-last", "0"], 2, "--keep-last is not a flag"),
        (["verify", "RUN"], 2, "RUN comes before verify. HINT: python -m fsdp.checkpoint RUN verify"),
        (["README.md"], 4, "README.md is no folder"),
        ([], 2, "RUN is missing. HINT: python -m fsdp.checkpoint --help"),
    ],
)
def test_a_wrong_command_is_named(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        got = checkpoints.main(words)
    except SystemExit as left:
        got = left.code  # type: ignore[assignment]
    assert got == code
    assert said in capsys.readouterr().err


@pytest.mark.needs("transformers")
def test_the_tokenizer_of_the_data_takes_the_place_of_the_models(tmp_path: Path) -> None:
    files = {"tokenizer.json": "1", "special_tokens_map.json": "1", "generation_config.json": "1"}
    for folder, names in (("model", files), ("own", {"tokenizer.json": "2", "tokenizer_config.json": "{}"})):
        (tmp_path / folder).mkdir()
        for name, text in {**names, "config.json": "0", "weights.bin": "0"}.items():
            (tmp_path / folder / name).write_text(text)
    source: Any = SimpleNamespace(
        folder=tmp_path / "model", tokenizer=str(tmp_path / "own"), chat_template=""
    )
    source.config_json = lambda dtype: str(dtype)

    def written() -> dict[str, str]:
        writers = export_module._side_files(source, tmp_path / "out", torch.float32)
        (tmp_path / "out").mkdir(exist_ok=True)
        for file, write in writers.items():
            write(file)
        return {file.name: file.read_text() for file in writers}

    common = {"config.json": "torch.float32", "generation_config.json": "1"}
    assert written() == {**common, "tokenizer.json": "2", "tokenizer_config.json": "{}"}
    source.tokenizer = str(tmp_path / "gone")  # of a folder of tokens from another machine
    assert written() == {**files, **common}
