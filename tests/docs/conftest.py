"""Commands as a person types them, in a copy of the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import FOLDERS, ROOT

COPIED = ("train.py", "shardrun", "examples", *FOLDERS)
MINE = """
from torch import arange, nn
from torch.utils.data import Dataset


class Words(Dataset):
    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return ((arange(784.0) + index) / 784).view(1, 28, 28), index % 10


def build(folder=None, width: int = 64, vocab_size: int = 256):
    if folder is not None:
        return Words(folder)
    return nn.Sequential(nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, two run directories in it, and what a person would have beside them."""
    folder = tmp_path_factory.mktemp("typed")
    for name in COPIED:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / name)
    (folder / "mine.py").write_text(MINE)
    for name in ("notes", "corpus"):
        (folder / name).mkdir()
        (folder / name / "a.md").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    stories = [json.dumps({"text": f"Once upon a time {n}"}) for n in range(2000)]
    (folder / "stories.jsonl").write_text("\n".join(stories))
    programs = folder / "bin"
    programs.mkdir()
    for name, before in (("python", ""), ("torchrun", " -m torch.distributed.run --standalone")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{before} "$@"\n')
        (programs / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    flags = "--train.steps 3 --checkpoint.every_steps 1 --watch.enabled false"
    done = typed(f"python train.py {flags} --run.dir RUN", place)
    assert done.returncode == 0, done.stderr
    shutil.copytree(place / "runs/A", place / "runs/B")
    return place / "runs/A"


def typed(command: str, place: Path) -> subprocess.CompletedProcess[str]:
    filled = re.sub(r"\b(RUN|A)\b", "runs/A", command)
    filled = re.sub(r"\b[BC]\b", "runs/B", filled).replace("FOLDER", "exported")
    environment = {
        **os.environ,
        "PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(place / "cache"),
    }
    return subprocess.run(
        filled, shell=True, cwd=place, env=environment, capture_output=True, text=True, timeout=500
    )
