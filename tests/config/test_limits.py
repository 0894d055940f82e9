"""Configuration files that are too large or too deep: one line that names the file, and no memory taken."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from fsdp.base.commands import quoted
from fsdp.base.errors import ConfigError
from fsdp.base.text import printable_line
from fsdp.config import load, read_recipe, run_toml
from fsdp.config.limits import MOST_LEVELS, check_keys, parse_toml

ROOT = Path(__file__).parents[2]
DEEP = ".".join("a" * 1200)
NESTED = "[" * 200 + "]" * 200
REFUSED = {
    f"{DEEP} = 1": "a key has more than 32 parts",
    f"[{DEEP}]": "a key has more than 32 parts",
    f"[model.args]\nx = {{{DEEP} = 1}}": "a key has more than 32 parts",
    f'[model]\nname = """mlp""""\n{DEEP} = 1': "a key has more than 32 parts",
    '"a b" . ' * 40 + "c = 1": "a key has more than 32 parts",
    ".".join("a" * 30_000) + " = 1": "a key has more than 32 parts",
    f"[model.args]\nx = {NESTED}": "values are nested more than 32 levels deep",
    f"[model.args]\nx{'.a' * 31} = 1": "values are nested more than 32 levels deep",
    "[train]\nsteps = 0x" + "f" * 5000: "a whole number has more than 300 digits",
    "#" * (1 << 20) + "\n": "it has more than 1 MiB",
}
HONEST = (
    f'a = "{DEEP}"',
    f"a = '{DEEP}'",
    f'a = """\n{DEEP}\n"""',
    f"a = '''{DEEP}'''",
    f"# {DEEP}",
    rf'a = """\""" {DEEP}"""',
    rf'a = "\\" # {DEEP}',
    f'a = """x"""""\nb = "{DEEP}"',
    ".".join("a" * 31) + " = 1",
)


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
def test_a_recipe_beyond_the_limits_is_one_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(["--config", str(file)])
    hint = "HINT: compare it with recipes/digits.toml"
    assert str(refused.value) == f"--config {file} cannot be used: {REFUSED[text]}. {hint}"


@pytest.mark.parametrize("text", HONEST, ids=range(len(HONEST)))
def test_dots_in_texts_and_comments_are_no_keys(text: str) -> None:
    assert parse_toml(text) == tomllib.loads(text)


def test_recipes_that_ship_are_far_within_the_limits() -> None:
    for file in (ROOT / "recipes").glob("*.toml"):
        parse_toml(file.read_text(encoding="utf-8"))
        assert file.stat().st_size < 1 << 14


@pytest.mark.parametrize(
    "text", ['"""\\' * 200_000, "'''a" * 200_000, '"' * 800_000, "a . " * 20 + " " * 900_000]
)
def test_the_search_for_long_keys_reads_each_character_once(text: str) -> None:
    check_keys(text)  # minutes, if an end that is missing were looked for anew


def test_an_argument_in_a_flag_is_no_deeper_than_a_recipe_may_hold(tmp_path: Path) -> None:
    flags = ["--model.name", "mlp", "--model.args.x", "[" * (MOST_LEVELS - 2) + "]" * (MOST_LEVELS - 2)]
    (tmp_path / "config.toml").write_text(run_toml(load(flags)))
    assert load(["--config", str(tmp_path / "config.toml")]).model == load(flags).model
    flags[-1] = f"[{flags[-1]}]"
    with pytest.raises(ConfigError, match=r"^--model\.args\.x cannot be used: values are nested more"):
        load(flags)


def test_a_sparse_config_of_a_run_is_not_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    with file.open("wb") as opened:
        os.truncate(opened.fileno(), 8 << 30)
    with pytest.raises(ConfigError, match=r"config\.toml cannot be used: it has more than 1 MiB\."):
        read_recipe(str(file))


def test_a_pipe_is_no_config_of_a_run_and_no_list_of_sources(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    os.mkfifo(file)
    for flag in ("--config", "--data.sources"):
        with pytest.raises(ConfigError, match=r"config\.toml cannot be used: it is not a regular file\."):
            load([flag, str(file)])


def test_a_recipe_may_come_from_a_pipe() -> None:
    ours, theirs = os.pipe()
    os.write(theirs, b"[train]\nsteps = 3\n")
    os.close(theirs)
    try:
        assert read_recipe(f"/dev/fd/{ours}") == {"train.steps": 3}
    finally:
        os.close(ours)


def test_text_of_a_file_is_one_printable_line() -> None:
    assert printable_line("a\nb\r\x1b[31m\u2028\x85\u202e é") == r"a\nb\r\x1b[31m\u2028\x85\u202e é"
    assert quoted("a b.toml") == "'a b.toml'"
    assert quoted("a'\n\\é") == r"$'a\x27\x0a\x5cé'"
