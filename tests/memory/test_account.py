"""The account equals the arithmetic for a known model and mesh, by kind and phase."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from tests.support import runs, user_code

RANKS = 2
STEPS = (
    "--train.steps 6 --profile.memory true --profile.steps 3:5 "
    "--checkpoint.export false --train.clip_grad_norm 0"
)


def accounts(folder: Path, *more: str, ranks: int = RANKS) -> list[dict[str, Any]]:
    said = runs.failures(ranks, folder, STEPS, *more)
    assert said == [None] * ranks, said
    files = [folder / "profile" / f"rank{rank}_memory.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) for file in files]


def end_of(account: dict[str, Any], phase: str) -> dict[str, int]:
    """Memory by kind at the last end of a phase; the minimum over the steps, since a gloo thread keeps a
    finished collective's tensors until it runs again, on a busy machine sometimes into the next phase.
    """
    by_step = {end["step"]: end["kinds"] for end in account["ends"] if end["phase"] == phase}
    return {kind: min(kinds[kind] for kinds in by_step.values()) for kind in account["ends"][0]["kinds"]}


def shard_bytes(parameters: list[nn.Parameter], ranks: int = RANKS) -> int:
    """FSDP pads rows to a multiple of the ranks."""
    return sum(-(-p.shape[0] // ranks) * (p.numel() // p.shape[0]) * 4 for p in parameters)


def local_bytes(parameters: list[nn.Parameter], rank: int) -> int:
    def rows(p: nn.Parameter) -> int:
        each = -(-p.shape[0] // RANKS)
        return max(0, min(each, p.shape[0] - rank * each))

    return sum(rows(p) * (p.numel() // p.shape[0]) * 4 for p in parameters)


def test_parameters_gradients_and_adam_match_the_arithmetic(tmp_path: Path) -> None:
    everything = list(user_code.Uneven().parameters())
    for rank, account in enumerate(accounts(tmp_path)):
        reduced, between = end_of(account, "reduce"), end_of(account, "optimizer")
        assert reduced["parameters"] == between["parameters"] == shard_bytes(everything)
        assert reduced["gradients"] == shard_bytes(everything)
        assert between["gradients"] == 0
        # Two moments of the rows that this rank holds, and a step counter a parameter.
        assert (
            reduced["optimizer"]
            == between["optimizer"]
            == 2 * local_bytes(everything, rank) + 4 * len(everything)
        )
        assert between["gathered"] == between["communication"] == 0
        # Its own loss, kept to name the rank, and the sum of all.
        assert between["activations"] == 2 * 8
        assert account["peak"]["bytes"] == sum(account["peak"]["kinds"].values())


def test_unsharded_gradients_of_accumulation_are_gradients(tmp_path: Path) -> None:
    """Micro-batches without reduction keep whole gradients, those with reduction shards."""
    everything = list(user_code.Uneven().parameters())
    account = accounts(tmp_path / "last", "--train.micro_batch 3 --mesh.accumulate last")[0]
    first = next(end["kinds"] for end in account["ends"] if end["phase"] == "backward")
    assert first["gradients"] == sum(p.numel() for p in everything) * 4
    account = accounts(tmp_path / "every", "--train.micro_batch 3 --mesh.accumulate every")[0]
    first = next(end["kinds"] for end in account["ends"] if end["phase"] == "backward")
    assert first["gradients"] == shard_bytes(everything)
