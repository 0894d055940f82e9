"""Ranks that run different parts of a model are named at that step; those that run the same parts are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import failures, run

ROOT = Path(__file__).parents[2]
MODELS = "tests.watch.branching"
EVERY = "--train.micro_batch 3 --mesh.accumulate every"


@pytest.mark.parametrize(
    ("ranks", "words", "step", "what"),
    [
        (2, "Dropped", 3, "and 5 more, rank 1 has none"),
        (2, "OwnBranch", 1, "branches.0.norm.weight and 11 more, rank 1 has none"),
    ],
    ids=["layerdrop", "branches"],
)  # fmt: skip
def test_a_difference_is_found_at_its_step(
    ranks: int, words: str, step: int, what: str, tmp_path: Path
) -> None:
    said = failures(ranks, tmp_path / "run", f"--model.name {MODELS}:{words}")
    assert len(set(said)) == 1, said
    text = said[0] or ""
    assert text.startswith(f"TrainingError: step {step}: ranks run different parts of the model"), text
    assert what in text
    assert "HINT: draw what is left out from a generator with the same seed" in text


def test_parts_that_all_ranks_leave_out_are_no_difference(tmp_path: Path) -> None:
    words = f"--model.name {MODELS}:Dropped --model.args.same true {EVERY}"
    heldout = "--train.eval_every_steps 5 --data.name tests.support.user_code:vectors_with_heldout"
    finished = run(2, tmp_path / "run", words, heldout)
    assert max(record["step"] for record in finished.records) == 20
