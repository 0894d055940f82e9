"""Row files of the tests, and a cache of their own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp.data import documents
from fsdp.tokenize.shards import TokenizeJob, tokenize


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def texts(count: int) -> list[dict[str, Any]]:
    return [{"id": n, "text": f"Document {n}: once upön a time" + "!" * (n % 7)} for n in range(count)]


def bytes_in(folder: Path, split: str) -> bytes:
    """The documents of a tokenized folder, read as uint16 bytes."""
    files = sorted(folder.glob(f"{split}-*.bin"))
    return bytes(np.concatenate([np.fromfile(path, "<u2") for path in files]).astype(np.uint8))


def rows_in(readers: Iterable[Any], size: int = 1 << 30) -> list[dict[str, Any]]:
    """All rows of the readers, read in parts of this size."""
    return [
        dict(row.values) for reader in readers for part in reader.parts(size) for row in reader.read(part)
    ]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child process would import transformers for each case; tests/data/test_documents.py starts one."""

    def tokenize_here(job: TokenizeJob, out: str) -> None:
        tokenize(job, Path(out), 1)

    monkeypatch.setattr(documents, "run_child", tokenize_here)
