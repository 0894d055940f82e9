"""Ranks that run different parts of a model are named at that step; those that run the same parts are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule

from tests.support.plain_loop import relative_difference
from tests.support.runs import failures, run

ROOT = Path(__file__).parents[2]
MODELS = "tests.watch.branching"
EVERY = "--train.micro_batch 3 --mesh.accumulate every"


def test_a_difference_is_found_at_its_step(tmp_path: Path) -> None:
    said = failures(2, tmp_path / "run", f"--model.name {MODELS}:Dropped")
    assert len(set(said)) == 1, said
    text = said[0] or ""
    assert text.startswith("TrainingError: step 3: ranks run different parts of the model"), text
    assert "and 5 more, rank 1 has none" in text
    assert "HINT: --mesh.unsharded 'blocks.0.*,blocks.1.*' for a part" in text


SGD = (
    "--train.steps 5 --train.global_batch 6 --train.clip_grad_norm 0 --precision.master fp64 "
    "--optim.name sgd "
    f"--optim.lr 0.05 --optim.momentum 0 --data.name {MODELS}:rows"
)


@pytest.mark.parametrize("words", ["", "--model.args.blocks 2 --mesh.unsharded vision.*"])
def test_a_tower_that_a_rank_skips_trains_as_in_one_process(words: str, tmp_path: Path) -> None:
    """Parameters of the root's unit by themselves, where torch reduces zeros for them; units if unsharded."""
    if not words and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("torch reduces no zeros")
    runs = [run(n, tmp_path / str(n), f"--model.name {MODELS}:Tower {words}", SGD) for n in (1, 2)]
    losses = [[record["loss"] for record in one.records] for one in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert relative_difference(runs[1].parameters, runs[0].parameters) <= 1e-12


def test_ddp_names_the_tower_and_what_trains(tmp_path: Path) -> None:
    words = f"--model.name {MODELS}:Tower --model.args.blocks 2 --model.args.always false --mesh.strategy ddp"
    (text, *_) = failures(1, tmp_path / "run", words, SGD)
    assert "HINT: --mesh.strategy fsdp --mesh.unsharded 'vision.*', or --model.frozen 'vision.*'" in str(text)


def test_parts_that_all_ranks_leave_out_are_no_difference(tmp_path: Path) -> None:
    words = f"--model.name {MODELS}:Dropped --model.args.same true {EVERY}"
    heldout = "--train.eval_every_steps 5 --data.name tests.support.user_code:vectors_with_heldout"
    finished = run(2, tmp_path / "run", words, heldout)
    assert max(record["step"] for record in finished.records) == 20
