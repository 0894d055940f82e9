"""Data whose samples carry their number, and a run that notes the numbers that each step trains on."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fsdp import config as configuration
from fsdp.distributed.env import DistEnv
from fsdp.run import loop
from tests.support.world import run_world

VOCAB = 50
FLAGS = (
    "--model.name", "tests.support.data_ids:Scores", "--watch.enabled", "false", "--optim.lr", "1e-2",
    "--checkpoint.every_steps", "2", "--checkpoint.export", "false",
    # The step after a save may crash: it is sealed by then.
    "--checkpoint.mode", "blocking",
)  # fmt: skip


class Numbered(Dataset[dict[str, Tensor]]):
    """Sample i of a source has the id base + i, four tokens, and some masked targets."""

    def __init__(self, count: int, base: int = 0, vocab: int = VOCAB, masked: int = 0) -> None:
        self.count, self.base, self.vocab, self.masked = count, base, vocab, masked

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= self.count:
            raise IndexError(index)
        tokens = (torch.arange(5) * 7 + index + self.base) % VOCAB
        targets = tokens[1:].clone()
        targets[: (index + self.masked) % 4] = -100
        return {"inputs": tokens[:-1], "targets": targets, "ids": torch.tensor(self.base + index)}


def numbered(count: int, base: int = 0, masked: int = 0) -> Numbered:
    return Numbered(count, base, masked=masked)


def with_heldout(count: int, base: int = 0) -> tuple[Numbered, Numbered]:
    return Numbered(count, base), Numbered(5, base + 1000)


class Lines:
    """A reader of one shard's samples; its state is the number of those given."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.given = ids, 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.given < len(self.ids):
            index = self.ids[self.given]
            self.given += 1
            yield Numbered(index + 1)[index]
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Shards:
    """Shard i of S has the ids i, i + S, i + 2S … below `count`."""

    def __init__(self, shards: int, count: int) -> None:
        self.shards, self.count = shards, count

    def shard(self, index: int) -> Lines:
        return Lines(list(range(index, self.count, self.shards)))


def sharded(shards: int = 6, count: int = 48) -> Shards:
    return Shards(shards, count)


def lines(count: int = 48) -> Lines:
    return Lines(list(range(count)))


class ClassifiedLines(Lines):
    """Vectors with a class, as of a classifier."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for item in super().__iter__():
            yield {"inputs": torch.ones(12), "targets": item["ids"] % 5}


def classified() -> ClassifiedLines:
    return ClassifiedLines(list(range(48)))


def sharded_with_heldout() -> tuple[Shards, Numbered]:
    return Shards(2, 8), Numbered(5)


class Scores(torch.nn.Module):
    """A table of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, 6)
        self.head = torch.nn.Linear(6, VOCAB)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.embed(inputs)))
        return out


class OwnLoss(Scores):
    """Returns a loss alone."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        logits = super().forward(inputs)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def ids_of(batch: Mapping[str, Tensor]) -> list[int]:
    """Of its rows; a digest of their inputs where they carry none."""
    if "ids" in batch:
        return batch["ids"].tolist()
    return [zlib.crc32(row.cpu().numpy().tobytes()) for row in batch["inputs"]]


def on_a_rank(env: DistEnv, words: list[str], notes: str, crash_at: int) -> str | None:
    """Trains, and appends the ids of this rank's valid rows of each step; raises in step `crash_at`."""
    os.environ["XDG_CACHE_HOME"] = str(Path(notes).with_name("cache"))
    original = loop.TrainingLoop.train_step

    def noting(self: Any, batch: Any, lr: float) -> Any:
        step = self.state.step + 1
        if step == crash_at:
            raise RuntimeError("killed")
        ids = [n for one in batch.micro for n in ids_of(one.data)[: one.valid_rows]]
        with Path(notes, f"{env.world_size}-{env.rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "ids": ids}) + "\n")
        return original(self, batch, lr)

    loop.TrainingLoop.train_step = noting  # type: ignore[method-assign]
    try:
        loop.train(configuration.load(words), env)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        loop.TrainingLoop.train_step = original  # type: ignore[method-assign]
    return None


def train_and_note(
    ranks: int, folder: Path, name: str, *more: str, crash_at: int = 0
) -> tuple[dict[int, list[int]], list[str | None]]:
    """The ids of each step, in the order of the ranks; and each rank's error."""
    notes = folder / name
    notes.mkdir()
    words = ["--run.dir", str(folder / "run"), *FLAGS, *more]
    said = run_world(ranks, on_a_rank, words, str(notes), crash_at)
    steps: dict[int, list[int]] = {}
    for rank in range(ranks):
        for record in _records(notes / f"{ranks}-{rank}.jsonl"):
            steps.setdefault(record["step"], []).extend(record["ids"])
    return steps, said


def killed_and_resumed(folder: Path, *flags: str, crashes: tuple[int, int]) -> dict[int, list[int]]:
    """The ids of each step of a run that starts on 1 rank, and is killed and resumed on 3 and then 2 ranks.

    Each start resumes from a checkpoint; a run without a kill trains on the same samples.
    """
    one, said = train_and_note(1, folder, "a", *flags, crash_at=crashes[0])
    assert "killed" in str(said), said
    three, said = train_and_note(3, folder, "b", *flags, "--train.micro_batch", "2", crash_at=crashes[1])
    assert "killed" in str(said), said
    two, said = train_and_note(2, folder, "c", *flags)
    assert said == [None, None]
    assert 1 < min(three) < min(two)
    steps = {**one, **three, **two}
    whole = folder / "whole"
    whole.mkdir()
    straight, said = train_and_note(3, whole, "d", *flags)
    assert said == [None] * 3
    assert straight == steps
    return steps


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text().splitlines():
            yield json.loads(line)
