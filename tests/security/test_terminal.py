"""A terminal receives no escape sequence from a run directory, a store or a foreign file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp.base.errors import ConfigError
from fsdp.base.text import prepare_streams, print_line, printable, printable_line
from fsdp.checkpoint.__main__ import main as checkpoints
from fsdp.report.__main__ import main as report
from launch.slurm_job import main as slurm_job
from tests.security.test_named_code import foreign

RED = "\x1b[31mRED\x1b]0;title\x07\x9b2J\u202e"
IN_TOML = json.dumps(RED)
JUDGE = ["--job", "7", "--code", "1"]
Tool = Callable[[list[str]], int]


def config_of(run: Path, line: str) -> None:
    (run / "config.toml").write_text(f'{line}\n[data]\nname = "digits"\n[model]\nname = "mlp"\n', "utf-8")


def marker(run: Path, name: str, **fields: object) -> None:
    (run / "config.toml").unlink()
    (run / name).write_text(json.dumps(fields), "utf-8")


def folder(run: Path, name: str) -> None:
    (run / "checkpoints" / name).mkdir(parents=True)


PLACES: dict[str, tuple[Callable[[Path], object], Tool, list[str]]] = {
    "a checkpoint set aside": (lambda run: folder(run, f"step-00000009.broken-{RED}"), checkpoints, []),
    "an unknown field": (lambda run: config_of(run, f"[train]\n{IN_TOML} = 1"), report, []),
    "a folder's name": (lambda run: config_of(run, f"[checkpoint]\ndir = {IN_TOML}"), checkpoints, []),
    "a stop": (lambda run: marker(run, "STOPPED", reason=RED, step=1, why=RED), slurm_job, JUDGE),
    "a failure": (
        lambda run: marker(run, "FAILED", kind="FINAL", code=5, message=RED, rank=0, start="", time=""),
        slurm_job,
        JUDGE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_run_directory_gives_a_terminal_no_escape_sequence(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare, tool, words = PLACES[place]
    run = foreign(tmp_path / "run")
    prepare(run)
    command = ["judge", str(run)] if tool is slurm_job else [str(run)]
    tool([*command, *words])
    told = "".join(capsys.readouterr())
    assert told
    assert told == printable(told)


def test_a_log_and_a_line_escape_what_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    prepare_streams()
    assert logging.lastResort is not None
    logging.lastResort.handle(logging.LogRecord("", logging.WARNING, "", 1, "a file named %s", (RED,), None))
    print_line(f"two\nlines\tand {RED} für 日本\u3000語")
    error = capsys.readouterr().err
    assert error.count("\\x1b[31mRED\\x1b]0;title\\x07\\x9b2J\\u202e") == 2
    assert "two\nlines\tand" in error
    assert "für 日本\u3000語" in error


def test_a_name_with_a_line_break_adds_no_line_to_an_error() -> None:
    assert str(ConfigError("no field a\nrun.py: all is well.")) == "no field a\\nrun.py: all is well."
    assert printable_line("tab\t and \r") == "tab\\t and \\r"
