"""--help fits two screens and has the common fields; --help-all has every field."""

from __future__ import annotations

import pytest

import train
from fsdp.config import FIELDS
from fsdp.config.command_line import SECTIONS, field_docs, help_asked
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
