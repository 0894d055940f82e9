"""The cache of tokenized data (fsdp/tokenize/rows.py) in the test's own folder: a fixture, a rank's run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp.distributed.env import DistEnv
from tests.support import runs


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def on_a_rank(env: DistEnv, words: list[str], cache: str) -> str | None:
    """As runs.on_a_rank, with this cache: the pool's ranks have another environment."""
    os.environ["XDG_CACHE_HOME"] = cache
    return runs.on_a_rank(env, words)
