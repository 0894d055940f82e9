"""Flags, recipes, help, and the way back from config.toml: one tree, one parse."""

from __future__ import annotations

import dataclasses
import os
import tomllib
import typing
from pathlib import Path

import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import FIELDS, Config, changed_flags, config_hash, flatten, load, to_toml, write

OTHER = {"int": "7", "float": "0.5", "bool": "true", "str": "text"}


def test_flags_go_over_a_recipe_wherever_they_stand(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('backend = "ray"\n[train]\nsteps = 10\nglobal_batch = 8\n[model.args]\nwidth = 64\n')
    config = load(["--train.steps", "20", "--config", str(recipe), "--model.args.depth=2"])
    assert (config.backend, config.train.steps, config.train.global_batch) == ("ray", 20, 8)
    assert config.model.args == {"width": 64, "depth": 2}


def test_a_recipe_has_at_most_a_mebibyte_and_a_runs_file_is_no_fifo(tmp_path: Path) -> None:
    (tmp_path / "large.toml").write_text("#" * (1 << 20) + "\n")
    os.mkfifo(tmp_path / "config.toml")
    for name, said in (("large.toml", "it has more than 1 MiB"), ("config.toml", "it is not a regular file")):
        with pytest.raises(ConfigError, match=said):
            load(["--config", str(tmp_path / name)])


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--train.steps", "1e3"], 1000), (["--train.steps=1_000"], 1000), (["--train.steps", "12"], 12),
        (["--train.steps", "9007199254740993"], 2**53 + 1),
        (["--train.clip-grad-norm", "2"], 2.0), (["--watch.deterministic"], True),
        (["--watch.deterministic", "off"], False),
        (["--watch.deterministic", "--train.steps", "1"], True),
        (["--mesh.reshard_after_forward", "false"], "false"),
        (["--optim.warmup_steps", "-1"], -1), (["--run.dir", "a b/ü"], "a b/ü"),
    ],
)  # fmt: skip
def test_a_value_becomes_the_field_s_type(words: list[str], value: object) -> None:
    name = words[0].lstrip("-").partition("=")[0].replace("-", "_")
    found = flatten(load(words))[name]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        ("true", True),
        ("True", True),
        ("[1, 2]", [1, 2]),
        ("relu", "relu"),
        ('"3"', "3"),
        ("a=b", "a=b"),
    ],
)
def test_free_arguments_are_typed_by_what_they_look_like(text: str, value: object) -> None:
    assert load(["--model.args.x", text]).model.args == {"x": value}


def test_config_toml_gives_the_same_configuration_back(tmp_path: Path) -> None:
    config = load(
        ["--run.dir", 'quo"te\\back\x7f', "--model.args.width", "64", "--model.args.odd key", "[0.1, true]",
         "--model.args.\U00010000", "3",
         "--data.args.since", "2024-01-31", "--data.args.at", "2024-01-31T12:30:00",
         "--optim.lr", "1e-30", "--train.steps", "7", "--data.args.path", "ü\n", "--optim.eps", "1e-8"]
    )  # fmt: skip
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert load(["--config", str(path)]) == config
    assert set(tomllib.loads(to_toml(config))) == {f.name for f in dataclasses.fields(Config)}


def test_every_field_survives_the_way_back_when_it_is_changed(tmp_path: Path) -> None:
    """Each alone, at a value that is not its default, where no other field forbids it."""
    tried = 0
    for name, spec in FIELDS.items():
        if spec.is_args or spec.is_tables:
            continue
        choices = typing.get_args(spec.type)
        text = next(c for c in choices if c != spec.default) if choices else OTHER[spec.type.__name__]
        text = "false" if spec.default is True else text
        try:
            config = load([f"--{name}", text])
        except ConfigError:
            continue  # it needs another field beside it
        (tmp_path / "c.toml").write_text(to_toml(config), encoding="utf-8")
        again = load(["--config", str(tmp_path / "c.toml")])
        assert again == config, name
        assert flatten(again)[name] != spec.default, name
        tried += 1
    assert tried > len(FIELDS) * 0.7


def test_the_hash_names_what_is_trained_and_not_where() -> None:
    base = config_hash(Config())
    for words in (
        ["--run.dir", "x"],
        ["--mesh.strategy", "ddp"],
        ["--backend", "ray"],
        ["--train.stop_after", "3"],
    ):
        assert config_hash(load(words)) == base, words
    for words in (
        ["--run.seed", "1"],
        ["--optim.lr", "2e-3"],
        ["--model.args.width", "8"],
        ["--train.global_batch", "32"],
    ):
        assert config_hash(load(words)) != base, words


def test_a_flag_that_is_no_more_is_refused_where_typed_and_left_out_of_an_old_recipe(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for words in ("--speed.compile_cache off", "--speed.compile_cache", "--speed.compile_cache.x 1"):
        with pytest.raises(ConfigError, match=r"no flag any more\. HINT: export TORCHINDUCTOR_CACHE_DIR="):
            load(words.split())
    old = tmp_path / "config.toml"
    for value, warned in (("auto", 0), ("off", 1), ("off", 1)):
        old.write_text(f'[speed]\ncompile_cache = "{value}"\n')
        assert load(["--config", str(old)]) == Config()
        assert len(caplog.messages) == warned


def test_a_field_that_is_no_more_leaves_hashes_of_older_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    before, name = config_hash(Config()), "optim.warmup_steps"
    rest = {other: spec for other, spec in FIELDS.items() if other != name}
    monkeypatch.setattr(
        write, "flatten", lambda config: {n: v for n, v in flatten(config).items() if n in rest}
    )
    monkeypatch.setattr(write, "FIELDS", rest)
    assert config_hash(Config()) != before
    monkeypatch.setitem(write.REMOVED, name, (FIELDS[name].default, "nothing"))
    assert config_hash(Config()) == before


def test_changed_flags_make_the_same_configuration() -> None:
    given = ["--optim.lr", "0.5", "--model.args.width", "64", "--mesh.reshard_after_forward", "false"]
    config = load(given)
    assert changed_flags(flatten(Config())) == ["--data.name digits"]  # which the default model is given
    flags = changed_flags(flatten(config))
    assert sorted(flags) == [
        "--data.name digits",
        "--mesh.reshard_after_forward false",
        "--model.args.width 64",
        "--optim.lr 0.5",
    ]
    assert load(" ".join(flags).split()) == config
    assert changed_flags({**flatten(config), "run.dir": "elsewhere", "unknown.field": "<b>"}) == flags
