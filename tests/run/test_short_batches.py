"""With unequal batches on the ranks a resumed run equals the unbroken run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.runs import failures, run

# 3 samples over 2 ranks × 2 rows: one rank has a row too few, and a product of one row rounds otherwise than
# one of two.
SHORT = "--data.args.count 27 --train.global_batch 3 --train.micro_batch 2 --train.steps 4"


class Autoencoder(nn.Module):
    """Returns a loss of its own and reads no targets, which only its first forward shows."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(12, 7), nn.Linear(7, 12)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = nn.functional.dropout(self.narrow(x), 0.3, self.training)
        return {"loss": (self.wide(hidden) - x).square().mean()}


@pytest.mark.parametrize("model", ["", "--model.name tests.run.test_short_batches:Autoencoder"])
def test_every_later_loss_is_the_same_to_the_bit(model: str, tmp_path: Path) -> None:
    straight = run(2, tmp_path / "straight", SHORT, model)
    for stop in (1, 3):
        cut = tmp_path / f"cut-{stop}"
        assert failures(2, cut, SHORT, model, f"--train.stop_after {stop}") == [None, None]
        resumed = run(2, cut, SHORT, model)
        losses = [[r["loss"] for r in done.records if "loss" in r] for done in (resumed, straight)]
        assert losses[0] == losses[1]
        assert all(torch.equal(resumed.parameters[n], value) for n, value in straight.parameters.items())


def test_rows_of_padding_are_no_part_of_a_models_own_loss(tmp_path: Path) -> None:
    """The first step's loss on two ranks, one of which has a row of padding, is that of one process."""
    words = f"{SHORT} --model.name tests.run.test_short_batches:Even --precision.master fp64"
    losses = [run(ranks, tmp_path / str(ranks), words).records[0]["loss"] for ranks in (1, 2)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


class Even(Autoencoder):
    """Without dropout."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.wide(self.narrow(x)) - x).square().mean()}
