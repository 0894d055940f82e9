"""A researcher's first hour: two modules and two data sets of one's own, by what docs/models.md, docs/data.md
and docs/migrate.md say, started by torchrun on two ranks, resumed, and exported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
MINE = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, IterableDataset


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 24))
        self.text, self.head = nn.EmbeddingBag(100, 24), nn.Linear(24, 7)

    def forward(self, image, text, label):
        a, b = self.image(image), self.text(text)
        return {"match": 1 - F.cosine_similarity(a, b).mean(), "class": F.cross_entropy(self.head(a), label)}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Captioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = nn.Sequential(nn.Linear(16, 24), Block(24), Block(24))
        self.vision = nn.Sequential(nn.Linear(32, 24), Block(24), Block(24))
        self.head = nn.Linear(24, 7)

    def forward(self, text, picture, has_picture):
        x = self.text(text)
        if has_picture.any():
            x = x + self.vision(picture) * has_picture.unsqueeze(-1)
        return self.head(x)


class Dicts(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        text = torch.randint(0, 100, (9,), generator=draw)
        return {"image": torch.randn(32, generator=draw), "text": text, "label": index % 7}


class Lines(IterableDataset):
    def __iter__(self):
        for index in range(90):
            draw = torch.Generator().manual_seed(index)
            inputs = torch.randn(16, generator=draw), torch.randn(32, generator=draw), float(index % 4 == 0)
            yield inputs, index % 7


def pair():
    return Pair()


def captioner():
    return Captioner()


def dicts():
    return Dicts(), Dicts()


def lines():
    return Lines()
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("train.py", "fsdp", "launch", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def typed(clone: Path, words: str, code: int = 0) -> str:
    """What a command printed that starts with torchrun --nproc_per_node=2 train.py."""
    program = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "train.py",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*program, *words.split()], cwd=clone, env=environment, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode == 0) == (code == 0), done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(run: Path) -> dict[int, dict[str, float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record for record in records if "grad_norm" in record}


def resumed(clone: Path, words: str, total: int) -> tuple[str, dict[int, dict[str, float]]]:
    """Half of the steps, then the same command again: what it printed, and the records of all steps."""
    words += f" --train.steps {total} --train.global_batch 6 --optim.schedule constant"
    typed(clone, f"{words} --run.dir one --train.stop_after {total // 2}")
    said = typed(clone, f"{words} --run.dir one")
    return said, losses(clone / "one")


@pytest.mark.slow
def test_dicts_two_inputs_and_a_dict_of_losses(clone: Path) -> None:
    said, steps = resumed(clone, "--model.name mine:pair --data.name mine:dicts", 30)
    assert sorted(steps) == list(range(1, 31))
    for record in steps.values():
        assert record["loss/match"] + record["loss/class"] == pytest.approx(record["loss"], rel=1e-5)
    assert steps[30]["loss"] < steps[1]["loss"]
    assert "recorded beside loss/class, loss/match" in said
    state = torch.load(clone / "one/full_model/full-model.pt", weights_only=True)
    names: dict[str, type[torch.nn.Module]] = {}
    exec(MINE, names)
    names["Pair"]().load_state_dict(state)


@pytest.mark.slow
def test_an_iterable_and_a_tower_that_some_batches_skip(clone: Path) -> None:
    words = "--model.name mine:captioner --data.name mine:lines"
    said = typed(clone, f"{words} --train.steps 4 --train.global_batch 6 --run.dir hangs", code=1)
    assert "has left out vision.1, vision.2 in forward" in said
    assert "HINT: --mesh.unsharded 'vision.*' for a tower" in said
    said = typed(clone, f"{words} --train.steps 4 --train.global_batch 6 --mesh.strategy ddp", code=1)
    assert "the loss does not depend on vision.*, and" in said
    assert "HINT: --mesh.strategy fsdp --mesh.unsharded 'vision.*', or" in said
    assert "terminate called" not in said
    said, steps = resumed(clone, f"{words} --mesh.unsharded vision.*", 8)
    assert sorted(steps) == list(range(1, 9))
    assert "Lines has no state_dict: a resumed run reads it again" in said
    state = torch.load(clone / "one/full_model/full-model.pt", weights_only=True)
    assert state["vision.1.up.weight"].shape == (48, 24)
