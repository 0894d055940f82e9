"""A checkpoint of an ordinary TorchTrainer run of the tutorials' form is a start for ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.ray.cluster import REPOSITORY, Cluster
from tests.ray.runs import Run, torchrun

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STILL = ("--model.name", "vit", "--train.steps", "1", "--optim.lr", "1e-30", "--optim.weight_decay", "0")
"""One step that moves nothing: what is exported is what was loaded."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, joined: Cluster) -> Path:
    folder = tmp_path_factory.mktemp("tutorial")
    done = subprocess.run(
        [sys.executable, "-m", "bench.ray_peer", str(folder), "--steps", "4", "--every", "2"],
        cwd=REPOSITORY,
        text=True,
        env=joined.environment(RAY_ADDRESS=joined.address, PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    newest: Path = max((folder / "tutorial").glob("checkpoint_*/.metadata")).parent
    return newest


@pytest.mark.long
def test_its_weights_and_optimizer_are_gone_on_from(tmp_path: Path, written: Path) -> None:
    run: Run = torchrun(tmp_path / "run", 2, *STILL, "--checkpoint.resume", str(written))
    dcp_to_torch_save(written, tmp_path / "theirs.pt")
    theirs: dict[str, Any] = torch.load(tmp_path / "theirs.pt", weights_only=False)["app"]
    ours = torch.load(run.path / "full_model" / "full-model.pt", weights_only=True)
    assert ours.keys() == theirs["model"].keys()
    for name, tensor in theirs["model"].items():
        assert torch.equal(ours[name], tensor), name
    updates = {"optim.state.class_token.step": torch.zeros(())}
    dcp.load(updates, checkpoint_id=run.path / "checkpoints" / "step-00000001")
    assert updates["optim.state.class_token.step"] == 5, (
        "four updates of theirs and one of ours: the moments came along"
    )
