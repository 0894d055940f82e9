"""The configuration of another trainer is data; the recipe that `migrate` writes of it is trusted
(docs/security.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import load
from fsdp.config.__main__ import main
from fsdp.config.trust import CODE, TRAINING_CODE

ROOT = Path(__file__).parents[2]
ENDS = ("\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029")
CODE_OF_ITS_OWN = '[model]\nname = "subprocess:run"\n[model.args]\nargs = ["touch", "/tmp/x"]\n#'


def migrated(folder: Path, tree: dict[str, Any], name: str = "a.json") -> str:
    (folder / name).write_text(json.dumps(tree))
    assert main(["migrate", str(folder / name), "--out", str(folder / "recipe.toml")]) == 0
    return (folder / "recipe.toml").read_text()


@pytest.mark.parametrize("end", ENDS, ids=ascii)
def test_no_name_and_no_value_ends_a_comment(
    end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = CODE_OF_ITS_OWN.replace("\n", end)
    tree = {
        f"x{end}{more}": 1,
        "unknown": f"{end}{more}",
        "learning_rate": f"1{end}{more}",  # a reason quotes it
        "ddp_backend": f"{end}{more}",
        f"a{end}{more}.max_steps": 3,  # an origin
        "trainer": {f"{end}{more}": {"devices": 2}},
    }
    text = migrated(tmp_path, tree)
    assert tomllib.loads(text) == {"train": {"steps": 3}}
    assert text.replace("\n", "").isprintable()
    answer = capsys.readouterr().out
    assert answer.replace("\n", "").isprintable()
    assert answer.count("\n") == len(tree) + 1
    with pytest.raises(ConfigError) as listed:
        load(["--config", str(tmp_path / "a.json")])
    assert str(listed.value).replace("\n", "").isprintable()


def test_no_file_name_ends_a_comment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = 'a\n[model]\nname = "subprocess:run"\n#.json'
    (tmp_path / name).write_text('{"max_steps": 3}')
    assert main(["migrate", str(tmp_path / name)]) == 0
    written = next(tmp_path.glob("*.recipe.toml"))
    assert tomllib.loads(written.read_text()) == {"train": {"steps": 3}}
    typed = capsys.readouterr().out.splitlines()[-1].partition(" --config ")[2]
    words = subprocess.check_output(["bash", "-c", f"printf '%s|' {typed}"], text=True)
    assert words == f"{written}|--dry-run|"


def test_a_name_of_code_is_no_value_of_the_recipe(tmp_path: Path) -> None:
    names = (*CODE, *(name.rpartition(".")[2] for name in TRAINING_CODE), "lr_scheduler", "optim", "model")
    for code in ("os:system", "my-module:run", "os:system,tensorboard", "tensorboard, os:system"):
        tree = dict.fromkeys(names, code) | {"max_steps": 3}
        text = migrated(tmp_path, tree)
        assert tomllib.loads(text) == {"train": {"steps": 3}}
        assert f"--run.sinks {code}, once you know that code\n" in text
        (tmp_path / "recipe.toml").unlink()


def test_no_address_but_a_store_is_a_value_of_the_recipe(tmp_path: Path) -> None:
    text = migrated(tmp_path, {"output_dir": "sftp://host/x", "max_steps": 3})
    assert tomllib.loads(text) == {"train": {"steps": 3}}
    assert "sftp://host/x, once you know that address\n" in text


def test_no_file_that_it_names_is_read(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text('[[data.sources]]\nname = "a secret"\n')
    assert "a secret" not in migrated(tmp_path, {"sources": str(tmp_path / "other.toml"), "max_steps": 3})


def bomb(line: str, first: str) -> str:
    levels = [f"a0: &a0 {first}"]
    for nth in range(1, 10):
        aliases = ", ".join([f"*a{nth - 1}"] * 9)
        levels.append(f"a{nth}: &a{nth} {line.replace('ALIASES', aliases)}")
    return "\n".join(levels)


REFUSED = {
    "aliases.yaml": (bomb("[ALIASES]", "[1]"), "it holds more than 100,000 values, with its aliases in full"),
    "merges.yaml": (bomb("{<<: [ALIASES]}", "{x: 1}"), "it holds more than 100,000 values, with its aliases"),
    "circle.yaml": ("a: &a [*a]", "it holds more than 100,000 values, with its aliases in full"),
    "text.yaml": (
        f"a: &a {'x' * 500_000}\nb: [{'*a, ' * 5000}]",
        "its entries are more than 16,777,216 char",
    ),
    "key.json": (json.dumps({"k" * 300_000: dict.fromkeys(map(str, range(9999)))}), "its entries are more"),
    "large.json": (json.dumps({"a": "x" * (1 << 20)}), "it has more than 1 MiB"),
    "deep.toml": (f"{'.'.join('a' * 30_000)} = 1", "a key has more than 32 parts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_stands_for_more_than_it_is_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, reason = REFUSED[name]
    (tmp_path / name).write_text(text)
    assert main(["migrate", str(tmp_path / name)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"fsdp.config: {tmp_path / name} cannot be used: {reason}")
    assert printed.count("\n") == 1
    assert " HINT: " in printed


def test_aliases_and_merges_of_a_real_file_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("base: &b\n  learning_rate: 0.1\nother:\n  <<: *b\n  max_steps: 3\n")
    assert main(["migrate", str(file)]) == 0
    written = tomllib.loads((tmp_path / "a.recipe.toml").read_text())
    assert written == {"train": {"steps": 3}, "optim": {"lr": 0.1}}


def test_no_tag_of_yaml_makes_an_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(f"a: !!python/object/apply:os.mkdir ['{tmp_path}/made']\n")
    assert main(["migrate", str(tmp_path / "a.yaml")]) == 2
    assert "could not determine a constructor for the tag" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_a_pipe_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "z.json")
    done = subprocess.run(
        [sys.executable, "-m", "fsdp.config", "migrate", str(tmp_path / "z.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "z.json cannot be used: it is not a regular file. HINT: " in done.stderr


def test_a_name_of_very_many_parts_has_no_counterpart_at_once(tmp_path: Path) -> None:
    name = ".".join("a" * 100_000)
    assert tomllib.loads(migrated(tmp_path, {name: 1, f"{name}.max_steps": 3})) == {"train": {"steps": 3}}


def test_a_value_that_looks_like_a_flag_is_a_comment(tmp_path: Path) -> None:
    text = migrated(tmp_path, {"learning_rate": "--run.sinks", "max_steps": 3})
    assert tomllib.loads(text) == {"train": {"steps": 3}}
    assert "#   learning_rate --run.sinks: --optim.lr has no value." in text
