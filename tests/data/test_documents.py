"""documents: rows of files as samples, tokenized once; the same by every rank, start and process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdp.base.errors import ConfigError
from fsdp.config import DataSection
from fsdp.data import DataSet, build_dataset
from fsdp.distributed.env import DistEnv
from tests.data.test_text_tokens import rows_of
from tests.support import runs
from tests.support.data_cache import own_cache as own_cache
from tests.support.world import run_world
from tests.tokenize.rows import texts, write_lines

ROOT = Path(__file__).parents[2]


def data(path: Path | str, seq_len: int = 8, tokenizer: str = "", name: str = "", **args: Any) -> DataSet:
    place, folder = (name, str(path)) if name else (str(path), "")
    return build_dataset(DataSection(name=place, dir=folder, seq_len=seq_len, tokenizer=tokenizer, args=args))


def test_texts_are_one_row_cut_into_windows(tmp_path: Path) -> None:
    made = data(write_lines(tmp_path / "a.jsonl", texts(300)))
    train, targets = rows_of(made.train)
    assert np.array_equal(train[:, 1:], targets[:, :-1])
    text = bytes(train.reshape(-1).astype(np.uint8))
    assert text.startswith("Document 0: once upön a time\0Document 1: once upön a time!\0".encode())
    assert made.heldout is not None
    held = bytes(rows_of(made.heldout)[0].reshape(-1).astype(np.uint8))
    assert b"Document 99:" in held
    assert b"Document 99:" not in text
    assert (made.info.facts["vocab_size"], made.info.masks_targets) == (256, False)
    assert made.info.preprocess == {"tokenizer": "bytes", "end": 0}


def test_prompts_and_completions_without_a_tokenizer(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "é=", "completion": "e acute, cut off"}]
    made = data(write_lines(tmp_path / "a.jsonl", rows), heldout=0)
    inputs, targets = rows_of(made.train)
    assert inputs.tolist() == [[*b"1+1=2", 0, 0, 0], [*"é=e acu".encode()]]
    assert targets.tolist() == [[-100] * 3 + [ord("2"), 0] + [-100] * 3, [-100] * 2 + list(b"e acut")]
    assert made.info.masks_targets
    everything = rows_of(data(tmp_path, heldout=0, loss="all").train)[1]
    assert everything[0].tolist() == [*b"+1=2", 0, -100, -100, -100]
    stream = data(tmp_path, seq_len=4, heldout=0, rows="stream")
    assert rows_of(stream.train)[1][0].tolist() == [-100, -100, -100, ord("2")]


def test_a_folder_of_the_command_is_data(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", texts(300))
    done = subprocess.run([sys.executable, "-m", "fsdp.tokenize", str(path), str(tmp_path / "out")], cwd=ROOT)
    assert done.returncode == 0
    here, there = data(path), data(tmp_path / "out")
    assert np.array_equal(rows_of(here.train), rows_of(there.train))
    assert here.info == there.info
    by_tokens = data(tmp_path / "out", name="tokens")
    assert by_tokens.info.facts["vocab_size"] == 256
    assert np.array_equal(rows_of(by_tokens.train), rows_of(there.train))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer": "nowhere"}, r"--data.tokenizer nowhere is neither a folder with .* HINT: hf download now"),
    ({"text": "body"}, r"a.jsonl line 1 has no column body; its columns are id, text\. HINT: .*text text"),
    ({"text": "id"}, r"a.jsonl line 1: id is a int, not text\. HINT: "),
    ({"loss": "none"}, r"--data.args.loss none is not assistant or all or last\. HINT: "),
    ({"seq_len": 100_000}, r"not one sample of --data.seq_len 100000 and .* HINT: --data.seq_len \d+"),
    ({"chat_template": "no.jinja"}, r"--data.args.chat_template no.jinja cannot be read"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_wrong_flags(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", texts(30))
    with pytest.raises(ConfigError, match=message) as caught:
        data(path, **fields)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_beside_data_that_has_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--data.tokenizer x has no effect on --data.name synthetic"):
        build_dataset(DataSection(name="synthetic", tokenizer="x"))
    write_lines(tmp_path / "a.jsonl", texts(30))
    subprocess.run(
        [sys.executable, "-m", "fsdp.tokenize", str(tmp_path / "a.jsonl"), str(tmp_path / "out")],
        cwd=ROOT,
        check=True,
    )
    with pytest.raises(ConfigError, match=r"--data.args.text has no effect: .* holds tokens already"):
        data(tmp_path / "out", text="b")
    with pytest.raises(ConfigError, match=r"heldout has no effect: .* --heldout VALUE$"):
        data(tmp_path / "out", heldout=0.2)
    assert len(data(tmp_path / "out", heldout=0.01).train) == len(data(tmp_path / "out").train)


def on_a_rank(env: DistEnv, words: list[str], cache: str) -> str | None:
    os.environ["XDG_CACHE_HOME"] = cache
    return runs.on_a_rank(env, words)


def test_a_run_on_pairs_resumes_on_another_number_of_ranks(tmp_path: Path, own_cache: Path) -> None:
    """A rank whose rows are all cut before their completion trains on nothing; the others' loss counts."""
    rows = [{"prompt": "x" * (n % 40), "completion": f"={n % 40}"} for n in range(60)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    words = [
        "--data.name", str(path), "--data.seq_len", "24", "--model.name", "transformer",
        "--model.preset", "toy", "--train.steps", "6", "--train.global_batch", "8",
        "--watch.enabled", "false", "--run.seed", "1", "--data.args.heldout", "0.1",
    ]  # fmt: skip

    def run(ranks: int, name: str, *more: str) -> None:
        given = ["--run.dir", str(tmp_path / name), *words, *more]
        said = run_world(ranks, on_a_rank, given, str(own_cache))
        assert said == [None] * ranks, said

    run(1, "whole")
    run(2, "parts", "--train.stop_after", "3")
    run(1, "parts")
    whole, parts = (runs.finished(tmp_path / name) for name in ("whole", "parts"))
    losses = [[one["loss"] for one in made.records if "loss" in one] for made in (whole, parts)]
    assert losses[0][:6] == pytest.approx(losses[1][:6], rel=1e-4)
    for name, tensor in whole.parameters.items():
        assert torch.allclose(tensor, parts.parameters[name], atol=1e-4), name


@pytest.mark.parametrize("rows", ["document", "packed"])
def test_targets_behind_the_cut_are_a_warning_and_without_any_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rows: str
) -> None:
    long, short = ({"prompt": "q" * count, "completion": "yes"} for count in (30, 3))
    both = write_lines(tmp_path / "a.jsonl", [long, short] * 150)
    with caplog.at_level("INFO"):
        data(both, rows=rows)
    assert "150 of 300 have no token to train on within --data.seq_len 8" in caplog.text
    caplog.clear()
    assert (rows_of(data(both, seq_len=33, rows=rows).train)[1] != -100).any(axis=1).all()
    assert "no token to train on" not in caplog.text
    with pytest.raises(ConfigError, match=r"all 9 documents have no token .* HINT: --data.seq_len 33 holds"):
        data(write_lines(tmp_path / "b.jsonl", [long] * 9), rows=rows)
