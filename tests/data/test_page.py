"""docs/data.md: its Dataset, its stream and its mixture train as they stand there, and its JSON is read."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from fsdp import config as configuration
from fsdp.config import DataSection
from fsdp.data import build_dataset

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def block(kind: str, holding: str = "") -> str:
    blocks = re.findall(rf"^ *```{kind}\n(.*?)^ *```", PAGE, re.MULTILINE | re.DOTALL)
    (found,) = [one for one in blocks if holding in one]
    return str(found)


def test_the_pages_dataset_makes_its_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data_of_the_page.py").write_text(block("python", "class Sentences"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    data = build_dataset(DataSection(name="data_of_the_page:Sentences"))
    sys.modules.pop("data_of_the_page")
    assert (data.info.kind, data.info.tokens_per_sample) == ("text", 16)
    batch = data.train.batch(np.array([1, 4]))
    assert batch["inputs"].shape == batch["targets"].shape == (2, 16)
    assert (batch["targets"] != -100).sum(-1).tolist() == [2, 5]


def test_the_pages_stream_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stream_of_the_page.py").write_text(block("python", "class Reader"), encoding="utf-8")
    for n in range(6):
        (tmp_path / f"corpus-{n}.jsonl").write_text(f"[{n}, 7, 8]\n[{n}, 9, 8]\n[{n}, 7, 7]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    data = build_dataset(DataSection(name="stream_of_the_page:build"))
    sys.modules.pop("stream_of_the_page")
    assert data.train.batch(np.array([0, 5, 8]))["inputs"].tolist() == [[0, 7], [5, 7], [2, 9]]


def test_the_pages_mixture_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mix.toml").write_text(block("toml", "[[data.sources]]"))
    monkeypatch.chdir(Path(__file__).parents[2])
    config = configuration.load(["--data.sources", str(tmp_path / "mix.toml")])
    data = build_dataset(config.data)
    assert data.sources is not None
    assert data.sources.labels == ("pages", "code")


def test_the_pages_json_is_a_sidecar(tmp_path: Path) -> None:
    np.zeros(1_000_000, np.uint32).tofile(tmp_path / "a.bin")
    (tmp_path / "a.bin.json").write_text(block("json"), encoding="utf-8")
    data = build_dataset(DataSection(name=str(tmp_path), seq_len=100))
    assert data.info.facts["vocab_size"] == 128_256


def test_every_flag_on_the_page_is_one() -> None:
    named = set(re.findall(r"--([a-z]+\.[a-z_0-9]+)", PAGE))
    assert named - {"data.args"} <= set(configuration.FIELDS)
