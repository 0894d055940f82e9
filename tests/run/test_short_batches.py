"""With unequal batches on the ranks a resumed run equals the unbroken run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.runs import failures, run

# 3 samples over 2 ranks × 2 rows: one rank has a row too few, and a product of one row rounds otherwise than
# one of two.
SHORT = "--data.args.count 27 --train.global_batch 3 --train.micro_batch 2 --train.steps 4"


@pytest.mark.slow
@pytest.mark.long
def test_every_later_loss_is_the_same_to_the_bit(tmp_path: Path) -> None:
    straight = run(2, tmp_path / "straight", SHORT)
    for stop in (1, 2, 3):
        assert failures(2, tmp_path / f"cut-{stop}", SHORT, f"--train.stop_after {stop}") == [None, None]
        resumed = run(2, tmp_path / f"cut-{stop}", SHORT)
        assert [r["loss"] for r in resumed.records if "loss" in r] == [
            r["loss"] for r in straight.records if "loss" in r
        ]
        assert all(
            torch.equal(resumed.parameters[name], value) for name, value in straight.parameters.items()
        )
