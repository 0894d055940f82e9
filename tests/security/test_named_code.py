"""Code that a run directory's config.toml names runs only if the command line names it (docs/security.md)."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fsdp import config as configuration
from fsdp.checkpoint import __main__ as checkpoints
from fsdp.checkpoint import manifest
from fsdp.checkpoint.manifest import MANIFEST
from fsdp.config import trust
from fsdp.config.command_line import field_docs
from fsdp.config.trust import TRAINING_CODE, named_code
from fsdp.predict.__main__ import main as predict
from fsdp.report.__main__ import main as report
from tests.checkpoint.small import save_once
from tests.support.world import run_world

ROOT = Path(__file__).parents[2]
OWN = """
from pathlib import Path
import torch
from torch import nn

Path(__file__).with_name("imported").touch()


def build(num_classes):
    last = nn.LazyLinear(num_classes) if num_classes < 0 else nn.Linear(64, num_classes)
    return nn.Sequential(nn.Flatten(), last)


def data():
    items = [(torch.rand(1, 8, 8), torch.tensor(n % 10)) for n in range(40)]
    Images = type("Images", (list,), {"classes": tuple("abcdefghij")})
    return Images(items[:30]), Images(items[30:])
"""
Tool = Callable[[list[str]], int]


def foreign(run: Path, model: str = "mlp", data: str = "digits", arguments: str = "") -> Path:
    """A run directory that may come from anyone."""
    (run / "full_model").mkdir(parents=True)
    torch.save(
        {"1.weight": torch.zeros(10, 64), "1.bias": torch.zeros(10)}, run / "full_model" / "full-model.pt"
    )
    (run / "config.toml").write_text(
        f'[model]\nname = "{model}"\n[data]\nname = "{data}"\n{arguments}', encoding="utf-8"
    )
    return run


def runs_a_command(field: str, proof: Path) -> dict[str, str]:
    """Flags of `foreign` under which os:system is given a command."""
    return {field: "os:system", "arguments": f'[{field}.args]\ncommand = "touch {proof}"\n'}


@pytest.mark.parametrize("tool", [report, predict])
@pytest.mark.parametrize("field", ["model", "data"])
def test_what_a_run_directory_names_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tool: Tool, field: str
) -> None:
    proof = tmp_path / "ran"
    run = foreign(tmp_path / "run", **runs_a_command(field, proof))
    assert tool([str(run)]) == (0 if tool is report else 2)
    assert not proof.exists()
    said = capsys.readouterr().err
    assert f"{run}/config.toml names code, --{field}.name os:system" in said
    assert "HINT: add --trust-code os:system to load it from the working directory" in said
    assert len(said.splitlines()) == 1


def adapters(run: Path) -> None:
    """A folder whose manifest describes a checkpoint of adapters alone."""
    run_world(1, save_once, "ddp", str(run), 1)
    file = run / "checkpoints" / "step-00000001" / MANIFEST
    base = {"digest": "0", "origin": "--run.seed 0", "rank": 1, "alpha": 1.0}
    file.write_bytes(
        manifest.encode(manifest.Manifest(**{**vars(manifest.decode(file.read_bytes())), "base": base}))
    )


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.mark.long
def test_the_hint_works_as_typed(tmp_path: Path) -> None:
    """The run directory is elsewhere, the module in the working directory."""
    run = foreign(tmp_path / "run", "mine:build", "mine:data")
    work = tmp_path / "work"
    work.mkdir()
    (work / "mine.py").write_text(OWN)
    first = command(work, "fsdp.predict", str(run))
    assert not (work / "imported").exists()
    hint = re.search(r"HINT: add ((?:--trust-code \S+ )+)to load it", first.stderr)
    assert hint is not None, first.stderr
    second = command(work, "fsdp.predict", str(run), *shlex.split(hint[1]))
    assert second.returncode == 0, second.stderr
    assert "accuracy" in second.stdout


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module of the user."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "mine.py").write_text(OWN)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend("")
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return folder


def test_one_trusted_name_allows_no_other(
    tmp_path: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = foreign(tmp_path / "run", "mine:build", "mine:data")
    for trusted in ("mine:data", "mine", "mine:buil"):
        assert predict([str(run), "--trust-code", trusted]) == 2
        assert "--trust-code mine:build" in capsys.readouterr().err
    assert not (work / "imported").exists()


def test_trusted_code_is_not_taken_from_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = foreign(tmp_path / "run", "theirs:build")
    (run / "theirs.py").write_text(OWN)
    for place in (run, tmp_path):  # stands in the run directory, or has it on PYTHONPATH
        monkeypatch.chdir(place)
        monkeypatch.syspath_prepend(str(run))
        assert predict([str(run), "--trust-code", "theirs:build"]) == 2
        assert "in the run directory" in capsys.readouterr().err
        assert not (run / "imported").exists()


@pytest.mark.parametrize("field", TRAINING_CODE)
def test_code_of_training_is_replaced_by_the_default(tmp_path: Path, work: Path, field: str) -> None:
    """Also beside settings that only that code would read."""
    section, _, key = field.partition(".")
    more = "decay_share = 0.5\n" if section == "optim" else ""
    run = foreign(tmp_path / "run", arguments=f'[{section}]\n{key} = "mine:build"\n{more}')
    spec = configuration.FIELDS[field]
    assert configuration.flatten(trust.load_run_config(run))[field] == spec.default
    assert report([str(run)]) == 0
    assert not (work / "imported").exists()


def test_every_field_that_names_code_is_known(tmp_path: Path) -> None:
    """A new field must be refused or dropped when it comes from a run directory."""
    named = {name for name, (summary, _) in field_docs().items() if "package.module:" in summary}
    assert named == {"model.name", "data.name", *TRAINING_CODE}


# ---------------------------------------------------------------- other things that a configuration names


@pytest.mark.parametrize(
    "place", ["reference:///x.json", "sftp://host/x", "s3://b::reference://x", "simplecache::s3://b"]
)
def test_a_store_that_may_run_or_log_in_is_not_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(f'[checkpoint]\ndir = "{place}"\n')
    assert checkpoints.main([str(run)]) == 2
    assert f"names the store '{place}'" in capsys.readouterr().err
    assert report([str(run)]) == 0
    assert "names the store" in (run / "report.html").read_text()


def test_code_of_a_mixtures_source_needs_its_name_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        '[[data.sources]]\nname = "synthetic"\n[[data.sources]]\nname = "mine_own:data"\n'
        '[[data.sources]]\nname = "fashion_mnist"\ndir = "absent"\nargs = {mirror = "http://a"}\n'
    )
    with pytest.raises(trust.CodeRefused, match=r"names code, .*mine_own:data.*--trust-code mine_own:data"):
        trust.load_run_config(tmp_path)
    config = trust.load_run_config(tmp_path, trusted=["mine_own:data"])
    assert config.data.names == ("synthetic", "mine_own:data", "fashion_mnist")
    assert (config.data.sources[2].dir, config.data.sources[2].args) == ("", {})
    (tmp_path / "config.toml").write_text('[data]\nname = "fashion_mnist"\nvalidation = "absent"\n')
    assert trust.load_run_config(tmp_path).data.validation == ""


def test_all_code_that_a_run_names_goes_to_the_workers_of_a_joined_ray() -> None:
    words = "--model.name mine:m --data.name theirs:d --train.loss mine.loss:f --run.sinks one:A,two.b:C"
    more = "--optim.name own:opt --optim.schedule own:s --comm.all_gather hooks:g"
    found = named_code(configuration.load([*words.split(), *more.split()]))
    assert sorted(found) == sorted(
        ["mine:m", "theirs:d", "mine.loss:f", "one:A", "two.b:C", "own:opt", "own:s", "hooks:g"]
    )
    assert (
        named_code(
            configuration.load(["--model.name", "hf:org/name", "--data.name", "s3://bucket/rows.jsonl"])
        )
        == []
    )
