"""fp16's loss scale over time: an overflow halves it, consecutive good steps double it, and it survives a
resume.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp import config as configuration
from fsdp.distributed.env import DistEnv
from fsdp.optim import gradients as loss_scale
from fsdp.optim.gradients import LossScaler
from fsdp.optim.optimizer import TrainState
from fsdp.run.loop import train
from tests.support.runs import flags
from tests.support.world import run_world

FP16 = (
    "--precision.param fp16 --precision.loss_scale 1024 "
    "--checkpoint.every_steps 1000 --checkpoint.keep_last 9"
)


def state(scale: float, good_steps: int = 0) -> TrainState:
    model = nn.Linear(1, 1)
    return TrainState(model, torch.optim.SGD(model.parameters()), loss_scale=scale, good_steps=good_steps)


def scales_of_steps(env: DistEnv, words: list[str]) -> list[float]:
    """The scale that each step of a start was computed with, growing every third good step."""
    seen: list[float] = []
    unscale = LossScaler.unscale
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_scale, "GROWS_AFTER", 3)

        def spy(self: LossScaler, *args: object) -> torch.Tensor:
            seen.append(self.scale)
            return unscale(self, *args)  # type: ignore[arg-type]

        patch.setattr(LossScaler, "unscale", spy)
        train(configuration.load(words), env)
    return seen


@pytest.mark.long
def test_a_run_grows_it_and_a_resume_continues_the_count(tmp_path: Path) -> None:
    words = ["--run.dir", str(tmp_path), *flags(FP16, "--train.steps 10")]
    first = run_world(2, scales_of_steps, [*words, "--train.stop_after", "5"])
    assert first == [[1024.0] * 3 + [2048.0] * 2] * 2
    second = run_world(2, scales_of_steps, words)
    assert second == [[2048.0] + [4096.0] * 3 + [8192.0]] * 2, "the two good steps before the stop count"
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 10
    assert all(loss == loss for loss in losses)
