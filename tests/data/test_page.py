"""docs/data.md: its Dataset trains as it stands there, and its JSON is read."""

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


def block(kind: str) -> str:
    (found,) = re.findall(rf"^ *```{kind}\n(.*?)^ *```", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def test_the_pages_dataset_makes_its_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data_of_the_page.py").write_text(block("python"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    data = build_dataset(DataSection(name="data_of_the_page:Sentences"))
    sys.modules.pop("data_of_the_page")
    assert (data.info.kind, data.info.tokens_per_sample) == ("text", 16)
    batch = data.train.batch(np.array([1, 4]))
    assert batch["inputs"].shape == batch["targets"].shape == (2, 16)
    assert (batch["targets"] != -100).sum(-1).tolist() == [2, 5]


def test_the_pages_json_is_a_sidecar(tmp_path: Path) -> None:
    np.zeros(1_000_000, np.uint32).tofile(tmp_path / "a.bin")
    (tmp_path / "a.bin.json").write_text(block("json"), encoding="utf-8")
    data = build_dataset(DataSection(name=str(tmp_path), seq_len=100))
    assert data.info.facts["vocab_size"] == 128_256


def test_every_flag_on_the_page_is_one() -> None:
    named = set(re.findall(r"--([a-z]+\.[a-z_0-9]+)", PAGE))
    assert named - {"data.args"} <= set(configuration.FIELDS)
