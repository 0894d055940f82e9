"""A whole run of fsdp.run.loop.train on the pool's ranks, and its files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp import config as configuration
from fsdp.config import Config
from fsdp.distributed.env import DistEnv
from fsdp.run.loop import train
from tests.support.world import run_world

# one save at the end, which the export needs
QUIET = (
    "--train.steps", "20", "--checkpoint.every_steps", "1000", "--train.global_batch", "12",
    "--optim.lr", "1e-2",
    "--data.name", "tests.support.user_code:vectors", "--model.name", "tests.support.user_code:Uneven",
    # a process beside each of a thousand short runs; tests/watch turns it on
    "--watch.enabled", "false",
)  # fmt: skip


@dataclass(frozen=True)
class Finished:
    run: Path
    parameters: dict[str, Tensor]
    records: list[dict[str, Any]]


def flags(*more: str) -> list[str]:
    return [*QUIET, *" ".join(more).split()]


def settings(*more: str) -> Config:
    return configuration.load(flags(*more))


def on_a_rank(env: DistEnv, words: list[str]) -> str | None:
    """None, or the error as a user reads it."""
    try:
        train(configuration.load(words), env)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def run(ranks: int, folder: Path, *more: str) -> Finished:
    said = run_world(ranks, on_a_rank, ["--run.dir", str(folder), *flags(*more)])
    assert said == [None] * ranks, said
    return finished(folder)


def finished(folder: Path) -> Finished:
    full = torch.load(folder / "full_model" / "full-model.pt", weights_only=True)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Finished(folder, full, records)


def failures(ranks: int, folder: Path, *more: str) -> list[str | None]:
    return run_world(ranks, on_a_rank, ["--run.dir", str(folder), *flags(*more)])


def check_same_numbers(ranks: int, folder: Path, words: str, more: str) -> None:
    """Trains without `more` and with it: equal losses, gradient norms and parameters."""
    here, there = run(ranks, folder / "without", words), run(ranks, folder / "with", words, more)
    for name in ("loss", "grad_norm"):
        assert [one.get(name) for one in there.records] == [one.get(name) for one in here.records]
    assert all(torch.equal(there.parameters[name], value) for name, value in here.parameters.items())
