"""--precision.master bf16: parameters in half the bytes, updated in fp32 and rounded stochastically."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp.config import OptimSection
from fsdp.optim.optimizer import build_optimizer
from tests.support.marks import quick_are
from tests.support.runs import Finished, failures, run

MASTER = "--precision.master bf16"


def test_updates_below_the_resolution_of_bf16_move_the_mean() -> None:
    """A step of 1e-4 is a fortieth of what bf16 shows below 1: rounded to the nearest it would be none."""
    model = nn.Linear(256, 256, bias=False).bfloat16()
    start = nn.init.ones_(model.weight).detach().clone()
    optimizer = build_optimizer(OptimSection(lr=1e-4, weight_decay=0.0), model)
    for _ in range(50):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    moved = (start.float() - model.weight.detach().float()).mean()
    # 65,536 elements: the mean of their rounding has a deviation of about 5e-5
    assert float(moved) == pytest.approx(50 * 1e-4, abs=3e-4)
    assert torch.equal((start.float() - 1e-4).bfloat16(), start)
    assert len(model.weight.unique()) > 1


# ---------------------------------------------------------------- runs


def losses(finished: Finished) -> list[float]:
    return [record["loss"] for record in finished.records if "loss" in record]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "more"), quick_are([], [(2, ""), (3, "--optim.state 8bit --model.args.width 80")], [(2, "")])
)
def test_a_resumed_run_equals_the_unbroken_run(ranks: int, more: str, tmp_path: Path) -> None:
    words = f"{MASTER} {more} --optim.warmup_steps 0 --data.args.count 48"
    straight = run(ranks, tmp_path / "straight", words)
    assert failures(ranks, tmp_path / "cut", words, "--train.stop_after 9") == [None] * ranks
    for text in failures(ranks, tmp_path / "cut", more):
        assert "HINT: --precision.master bf16" in str(text)
    resumed = run(ranks, tmp_path / "cut", words)
    assert losses(resumed) == losses(straight)
    assert straight.parameters["head.weight"].dtype == torch.bfloat16
    assert all(torch.equal(resumed.parameters[n], value) for n, value in straight.parameters.items())
