"""The account equals the arithmetic for a known model and mesh, by kind and phase."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fsdp import config as configuration
from fsdp.base.units import byte_size
from fsdp.memory.account import by_size
from fsdp.memory.account_cuda import fill
from fsdp.memory.account_timeline import Mark, Timeline, ends_of_phases, peaks_by_phase
from fsdp.run.loop import _maybe_profile
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
        # Its own loss, kept to name the rank; the sum of all; and three numbers read later: two that compare
        # ranks, and the stop request.
        assert between["activations"] == 8 + 4 * 8
        assert account["peak"]["bytes"] == sum(account["peak"]["kinds"].values())
        assert account["parameters"] == sum(p.numel() for p in everything)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["true", "false"])
def test_parameters_that_stay_gathered_after_forward(tmp_path: Path, policy: str) -> None:
    model = user_code.Uneven()
    # Backward begins with the root's own parameters and with the last block.
    begun = [*model.stem.parameters(), *model.head.parameters(), *model.blocks[-1].parameters()]
    expected = RANKS * shard_bytes(begun if policy == "true" else list(model.parameters()))
    for account in accounts(tmp_path, f"--mesh.reshard_after_forward {policy}"):
        assert end_of(account, "forward")["gathered"] == expected
        assert end_of(account, "backward")["gathered"] == 0


def test_communication_buffers_are_counted(tmp_path: Path) -> None:
    block = shard_bytes(list(user_code.Block(13).parameters()))
    for account in accounts(tmp_path):
        buffers = account["phases"]["backward"]["kinds"]["communication"]
        # A reduce-scatter's input is the whole unit's gradients; its output becomes the gradients and is
        # counted there.
        assert buffers >= RANKS * block
        assert end_of(account, "reduce")["communication"] == 0


@pytest.mark.slow
def test_activations_grow_with_the_micro_batch_and_only_with_it(tmp_path: Path) -> None:
    """12 samples per step on two ranks in micro-batches of 1, 2 and 3: activations at the end of forward grow
    linearly.
    """
    ends = []
    for rows in (1, 2, 3):
        account = accounts(tmp_path / str(rows), f"--train.micro_batch {rows}")[0]
        ends.append(end_of(account, "forward")["activations"])
    assert ends[2] - ends[1] == ends[1] - ends[0] > 0


def test_unsharded_gradients_of_accumulation_are_gradients(tmp_path: Path) -> None:
    """Micro-batches without reduction keep whole gradients, those with reduction shards."""
    everything = list(user_code.Uneven().parameters())
    account = accounts(tmp_path / "last", "--train.micro_batch 3 --mesh.accumulate last")[0]
    first = next(end["kinds"] for end in account["ends"] if end["phase"] == "backward")
    assert first["gradients"] == sum(p.numel() for p in everything) * 4
    account = accounts(tmp_path / "every", "--train.micro_batch 3 --mesh.accumulate every")[0]
    first = next(end["kinds"] for end in account["ends"] if end["phase"] == "backward")
    assert first["gradients"] == shard_bytes(everything)


def test_replicas_hold_all_parameters(tmp_path: Path) -> None:
    everything = list(user_code.Uneven().parameters())
    whole = sum(p.numel() for p in everything) * 4
    for account in accounts(tmp_path, "--mesh.strategy ddp"):
        between = end_of(account, "optimizer")
        assert between["parameters"] == whole
        assert between["optimizer"] == 2 * whole + 4 * len(everything)
        assert end_of(account, "reduce")["gradients"] == whole


@pytest.mark.slow
def test_profiling_does_not_change_losses(tmp_path: Path) -> None:
    words = "--train.steps 4 --checkpoint.export true"
    plain = runs.run(RANKS, tmp_path / "plain", words)
    seen = runs.run(
        RANKS, tmp_path / "seen", words, "--profile.memory true --profile.trace true --profile.steps 2:3"
    )
    assert [r["loss"] for r in plain.records] == [r["loss"] for r in seen.records]
    assert not (tmp_path / "plain" / "profile").exists()
    names = {path.name for path in (tmp_path / "seen" / "profile").iterdir()}
    each = (
        "memory.json",
        "startup.json",
        "trace.json.gz",
        "operators.txt",
        "steps.json",
    )
    assert names == {"summary.json", *(f"rank{rank}_{name}" for rank in range(RANKS) for name in each)}


def test_off_costs_nothing() -> None:
    """Without the flag there is no listener on the phases."""
    run: Any = SimpleNamespace(config=configuration.load([]))
    assert _maybe_profile(run) is None


# ---------------------------------------------------------------- without ranks


def test_the_allocator_s_history_by_kind() -> None:
    """A parameter from before, a gathered buffer, activations freed in backward, gradients known at their
    reduction.
    """
    timeline = Timeline(("parameters", "gathered", "gradients", "activations", "communication", "other"))
    events = [
        ("alloc", 200, 40, 1.05), ("alloc", 300, 40, 1.06), ("free_requested", 300, 40, 1.08),
        ("alloc", 400, 30, 1.2),
        ("alloc", 500, 25, 2.1), ("free_requested", 400, 30, 2.2), ("free_completed", 400, 30, 2.3),
        ("segment_free", 900, 1, 2.3), ("free_requested", 777, 9, 2.35),
    ]  # fmt: skip
    history = [{"action": a, "addr": at, "size": size, "time_us": int(t * 1e6)} for a, at, size, t in events]
    marks = [Mark(1.0, "forward", 7), Mark(2.0, "backward", 7), Mark(3.0, "reduce", 7)]
    sightings = [(1.0, 100, "parameters"), (2.0, 200, "gathered"), (2.15, 500, "gradients")]
    fill(timeline, [(100, 64)], history, marks, sightings, [(1.04, 1.10)])
    peaks = peaks_by_phase(timeline)
    # 300 was allocated while FSDP communicated and released before it had an owner: a buffer.
    assert peaks["forward"].kinds["communication"] == 40
    assert peaks["forward"].bytes == 64 + 40 + 40
    assert peaks["forward"].kinds["parameters"] == 64
    assert peaks["backward"].kinds["activations"] == 30
    assert peaks["backward"].kinds["gradients"] == 25
    assert ends_of_phases(timeline)[-1]["kinds"] == {
        "parameters": 64, "gathered": 40, "gradients": 25, "activations": 0, "communication": 0, "other": 0,
    }  # fmt: skip


def test_sizes_as_text() -> None:
    assert [byte_size(n) for n in (0, 999, 1024, 1.5 * 2**20, 3 * 2**30, 5 * 2**40)] == [
        "0 B", "999 B", "1 KiB", "1.5 MiB", "3 GiB", "5 TiB",
    ]  # fmt: skip
    assert by_size({"a": 1, "b": 2048, "c": 0}) == "b 2 KiB, a 1 B"
