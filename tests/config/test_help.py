"""--help fits two screens and has the common fields; --help-all has every field."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

import train
from fsdp.config import FIELDS
from fsdp.config.command_line import SECTIONS, field_docs, help_asked
from fsdp.data import BUILT_INS
from tests.config.test_bad_inputs import train_py

COMMON = [name for name, spec in FIELDS.items() if spec.meta["common"]]


def text_of(*argv: str) -> str:
    text = help_asked(argv, train.__doc__ or "")
    assert text is not None
    return text


def flags_in(text: str) -> set[str]:
    words = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    names = {word.removeprefix("--").removesuffix(".NAME") for word in words}
    return names - {"config", "dry-run", "help", "help-all"}


def test_help_is_two_screens_with_every_common_flag() -> None:
    lines = text_of("--help").splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 110
    assert flags_in("\n".join(lines)) == set(COMMON)
    assert 30 < len(COMMON) < len(FIELDS) / 2


@pytest.mark.parametrize("section", SECTIONS)
def test_help_of_a_section_has_its_flags_only(section: str) -> None:
    every = {name for name in FIELDS if name.startswith(f"{section}.")}
    assert flags_in(text_of("--help-all", section)) == every
    assert flags_in(text_of("--help", section)) == (every & set(COMMON) or every)


def test_help_all_lists_every_field_with_type_default_unit_and_detail() -> None:
    text = text_of("--help-all")
    assert flags_in(text) == set(FIELDS)
    joined = " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 110
    assert "--mesh.strategy auto|fsdp|hsdp|ddp" in joined
    for name, spec in FIELDS.items():
        assert all(text in joined for text in field_docs()[name]), name
        if spec.meta["unit"] and spec.default != "":
            assert f" {spec.meta['unit']})" in joined, name


def test_the_command_prints_help_and_refuses_an_unknown_section() -> None:
    done = train_py("--help")
    assert done.returncode == 0
    assert "torchrun --nproc_per_node=2 train.py" in done.stdout
    wrong = train_py("--help-all", "nonsense")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.count("\n") == 1
    assert "HINT: --help-all" in wrong.stderr


@pytest.mark.parametrize("name", ["documents", "tokens", "text", "folder", "synthetic", "chats.jsonl"])
def test_the_arguments_of_the_chosen_data_are_listed_with_their_meaning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").touch()
    text = help_asked(["--data.name", name, "--help", "data"], "", train.data_args) or ""
    rows = [line.split(maxsplit=2) for line in text.partition("--data.args of")[2].splitlines()[1:]]
    module, _, function = BUILT_INS[name if name in BUILT_INS else "documents"].partition(":")
    build = getattr(importlib.import_module(f"fsdp.data.{module}"), function)
    known = inspect.getfullargspec(build).kwonlyargs
    assert [row[0] for row in rows] == [f"--data.args.{key}" for key in known]
    assert all(len(row) == 3 for row in rows), rows
