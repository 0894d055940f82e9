"""--precision.frozen bf16: frozen weights in half the bytes, adapters and states in the master's dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.runs import Finished, run

LORA = "--lora.rank 3 --train.steps 6"
FROZEN = "--precision.frozen bf16"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_losses_are_those_of_the_rounded_weights(ranks: int, tmp_path: Path) -> None:
    mesh = "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2" if ranks == 4 else ""
    mesh += " --precision.master fp64"
    plain = run(ranks, tmp_path / "plain", LORA, mesh)
    rounded = {name: value.bfloat16().double() for name, value in plain_start(tmp_path).items()}
    torch.save(rounded, tmp_path / "rounded.pt")
    start = f"--model.weights {tmp_path / 'rounded.pt'}"
    expected = run(ranks, tmp_path / "expected", LORA, mesh, start)
    found = run(ranks, tmp_path / "found", LORA, mesh, start, FROZEN)
    assert losses(found) == pytest.approx(losses(expected), abs=1e-12)
    for name, value in expected.parameters.items():
        assert torch.allclose(found.parameters[name], value, rtol=0, atol=1e-12), name
    assert losses(found) == pytest.approx(losses(plain), abs=0.02)
    assert losses(found) != pytest.approx(losses(plain), abs=1e-9)


def losses(finished: Finished) -> list[float]:
    return [record["loss"] for record in finished.records if "loss" in record]


def plain_start(folder: Path) -> dict[str, torch.Tensor]:
    """The initial weights of the seed, from a run that trains with a rate of nothing."""
    return run(1, folder / "start", "--train.steps 1 --optim.lr 1e-30 --optim.weight_decay 0").parameters
