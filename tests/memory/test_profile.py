"""Files of --profile: an account of memory, a trace with FSDP's ranges, a table of operations."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from fsdp.base.phases import Phases
from fsdp.config import ProfileSection
from fsdp.memory import profile
from tests.support import runs
from tests.support.env import env_of


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiled")
    profile_flags = "--profile.trace true --profile.memory true --profile.steps 2:3"
    failures = runs.failures(
        2, folder, profile_flags, "--train.steps 5 --checkpoint.every_steps 3 --train.micro_batch 3"
    )
    assert failures == [None, None], failures
    return folder / "profile"


@pytest.mark.long
def test_the_account_has_every_kind_and_phase(profiled: Path) -> None:
    account = json.loads((profiled / "rank1_memory.json").read_text())
    kinds = {kind for peak in account["phases"].values() for kind, count in peak["kinds"].items() if count}
    assert {"parameters", "gathered", "gradients", "optimizer", "activations", "communication"} <= kinds
    assert {"forward", "backward", "reduce", "optimizer"} <= set(account["phases"])
    assert account["peak"]["bytes"] == sum(account["peak"]["kinds"].values())


def test_the_trace_has_the_chosen_steps_and_fsdp_in_them(profiled: Path) -> None:
    for rank in range(2):
        with gzip.open(profiled / f"rank{rank}_trace.json.gz", "rt") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"] if "name" in event}
        assert {"shardrun::forward of step 2", "shardrun::optimizer of step 3"} <= names
        assert not [name for name in names if name.endswith(("of step 1", "of step 4"))]
        assert any(name.startswith("FSDP::all_gather (blocks.0") for name in names)
        assert "FSDP::post_backward_reduce (blocks.2)" in names


def test_the_table_is_of_the_chosen_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of its own, and a start that resumes after the chosen steps, which is a warning."""
    warnings: list[str] = []
    monkeypatch.setattr(profile.log, "warning", lambda text, *args: warnings.append(text % args))
    monkeypatch.setattr(profile.collectives, "all_gather_objects", lambda lines: [lines])
    model = torch.nn.Linear(256, 256)
    section = ProfileSection(trace=True, steps="2:3")
    for first in (2, 7):
        folder = tmp_path / str(first)
        made = profile.Profile(
            section, folder, env_of(), model, torch.optim.AdamW(model.parameters()), Phases()
        )
        with made:
            for phase in ("data", "forward"):
                made.on_phase(phase, first)
            model(torch.ones(256, 256))
            made.on_phase("end", first)
    text = (tmp_path / "2" / "rank0_operators.txt").read_text()
    assert "aten::linear" in text
    assert [line.partition(":")[0] for line in warnings] == ["--profile.steps 2"]
    assert not (tmp_path / "7").exists()
