"""Ranks that run different parts of a model are named at that step; those that run the same parts are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import failures, run

ROOT = Path(__file__).parents[2]
MODELS = "tests.watch.branching"
EVERY = "--train.micro_batch 3 --mesh.accumulate every"
KEPT = "--mesh.reshard_after_forward false"
"""Each rank gathers as often as the others, whatever it runs: otherwise these ranks would hang."""


@pytest.mark.parametrize(
    ("ranks", "words", "step", "what"),
    [
        (2, "Dropped", 3, "and 5 more, rank 1 has none"),
        (2, "OwnBranch", 1, "branches.0.norm.weight and 11 more, rank 1 has none"),
        (2, f"Dropped --model.args.order true {KEPT}", 3, "rank 0 runs blocks.0 where rank 1 runs blocks.2"),
        (2, f"InTurn {EVERY}", 1, "blocks.0.a.norm.weight where rank 1 runs blocks.0.b"),
    ],
    ids=["layerdrop", "branches", "order", "micro_batches"],
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


@pytest.mark.parametrize(
    "words",
    [
        f"Dropped --model.args.same true {EVERY}",
        "InTurn --train.micro_batch 3 --mesh.accumulate last",
    ],
    ids=["micro_batches", "summed"],
)
def test_parts_that_all_ranks_leave_out_are_no_difference(words: str, tmp_path: Path) -> None:
    heldout = "--train.eval_every_steps 5 --data.name tests.support.user_code:vectors_with_heldout"
    finished = run(2, tmp_path / "run", f"--model.name {MODELS}:{words}", heldout)
    assert max(record["step"] for record in finished.records) == 20
