"""--data.validation: other files whole, a share, a split; and a folder's own file of validation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import DataSection, load, to_toml
from fsdp.data import DataSet, build_dataset
from tests.support.data_cache import own_cache as own_cache


def write(path: Path, letter: str, rows: int) -> Path:
    path.write_text(
        "".join(json.dumps({"prompt": "?", "completion": letter * 9}) + "\n" for _ in range(rows))
    )
    return path


def letters(data: DataSet) -> list[set[str]]:
    parts = [part for part in (data.train, data.heldout) if part is not None]
    rows = [part.batch(np.arange(len(part)))["inputs"] for part in parts]
    return [set(map(chr, part.unique().tolist())) - {"\0", "?"} for part in rows]


def test_other_files_are_held_out_whole_and_all_rows_are_trained_on(tmp_path: Path) -> None:
    train, val = write(tmp_path / "a.jsonl", "a", 200), write(tmp_path / "b.jsonl", "b", 7)
    data = build_dataset(DataSection(name=str(train), validation=str(val)))
    assert data.heldout is not None
    assert [len(data.train), len(data.heldout), letters(data)] == [200, 7, [{"a"}, {"b"}]]
    share = build_dataset(DataSection(name=str(train), validation="0.25"))
    assert share.heldout is not None
    assert [len(share.train), len(share.heldout)] == [150, 50]


def test_a_source_of_a_mixture_has_files_of_its_own(tmp_path: Path) -> None:
    first, second = (write(tmp_path / f"{letter}.jsonl", letter, 40) for letter in "ac")
    val = write(tmp_path / "b.jsonl", "b", 7)
    table = '[[data.sources]]\nname = "{}"\nweight = 1\nvalidation = "{}"\n'
    recipe = tmp_path / "mixed.toml"
    recipe.write_text(table.format(first, val) + table.format(second, 0.25))
    one = tmp_path / "one.toml"
    one.write_text('[data]\nname = "chats.jsonl"\nargs = {rows = "packed"}\nseq_len = 99\n')
    config = load(["--config", str(one), "--data.sources", str(recipe)])
    assert config.data.seq_len == 99
    data = build_dataset(config.data)
    assert data.heldout is not None
    assert [len(data.train), len(data.heldout), letters(data)] == [40 + 30, 7 + 10, [{"a", "c"}, {"b", "c"}]]
    assert 'validation = "0.25"' in to_toml(config)
    with pytest.raises(ConfigError, match=r'HINT: --data.sources none, or validation = "0.1" in the table'):
        load(["--config", str(recipe), "--data.validation", "0.1"])


def test_a_folders_own_file_is_held_out(tmp_path: Path) -> None:
    write(tmp_path / "chats.jsonl", "a", 20)
    write(tmp_path / "validation.jsonl", "b", 7)
    data = build_dataset(DataSection(name=str(tmp_path)))
    assert letters(data) == [{"a"}, {"b"}]


def test_a_file_of_a_command_line_is_evaluated_whole(tmp_path: Path) -> None:
    recipe, test = tmp_path / "config.toml", write(tmp_path / "test.jsonl", "t", 100)
    recipe.write_text('[data]\nname = "gone.jsonl"\nargs = {heldout = 0.05}\nvalidation = ""\n')
    only = ["--config", str(recipe), "--train.evaluate_only", "true", "--model.weights", str(test)]
    config = load([*only, "--data.name", str(test)])
    data = build_dataset(config.data, evaluated=True)
    assert data.heldout is not None
    assert len(data.heldout) == 100
    assert load(only).data.validation == ""
    folder = ["--model.name", "hf:export", "--train.evaluate_only", "true"]  # whose weights are named so
    assert load([*folder, "--data.name", "gone"]).data.validation == ""
    assert load([*only, "--data.name", str(test), "--data.args.heldout", "0.2"]).data.validation == ""


def test_a_share_of_a_dataset_of_the_user() -> None:
    data = build_dataset(DataSection(name="tests.support.user_code:vectors", validation="0.2"))
    assert data.heldout is not None
    every = build_dataset(DataSection(name="tests.support.user_code:vectors"))
    assert len(data.train) + len(data.heldout) == len(every.train)
    held = data.heldout.batch(np.array([0, 1]))["inputs"]
    assert held.equal(every.train.batch(np.array([4, 9]))["inputs"])


@pytest.mark.parametrize(
    ("name", "validation", "message"),
    [
        ("digits", "0.1", "its own rule says what is held out"),
        ("digits", "gone.jsonl", "--data.validation gone.jsonl has no effect on digits"),
        ("tests.support.user_code:vectors_with_heldout", "0.1", "return the pair"),
        ("text", "7", r"7 is no share .* HINT: --data.validation 0.05"),
    ],
)
def test_what_it_cannot_select_is_refused(name: str, validation: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_dataset(DataSection(name=name, validation=validation))


def test_two_flags_that_hold_out_are_refused() -> None:
    with pytest.raises(ConfigError, match="both select what is held out"):
        load(["--data.name", "a.jsonl", "--data.validation", "0.1", "--data.args.heldout", "0.1"])
