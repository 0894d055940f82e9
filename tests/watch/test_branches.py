"""Ranks that run different parts of a model are named at the step where it happens; those that run the same parts are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.runs import failures, run

MODELS = "tests.watch.branching"


@pytest.mark.parametrize(
    ("ranks", "words", "step", "what"),
    [
        (2, f"--model.name {MODELS}:Dropped", 3, "blocks.1.norm.weight (and 11 more parameters) has a gradient on rank 0 and none"),
        (4, f"--model.name {MODELS}:Dropped --mesh.strategy hsdp --mesh.replicate 2", 3, "has a gradient on rank"),
        (2, f"--model.name {MODELS}:OwnExpert", 1, "blocks.0.experts.0.norm.weight (and 23 more parameters)"),
        (2, f"--model.name {MODELS}:Dropped --model.args.order true", 3, "rank 0 runs blocks.0 where rank 1 runs blocks.2"),
        (2, f"--model.name {MODELS}:InTurn --train.micro_batch 3 --mesh.accumulate every", 1, "rank 0 runs blocks.0.a"),
    ],
    ids=["layerdrop", "layerdrop_hsdp", "experts", "order", "micro_batches"],
)  # fmt: skip
def test_it_is_found_where_it_happens(ranks: int, words: str, step: int, what: str, tmp_path: Path) -> None:
    said = failures(ranks, tmp_path / "run", words)
    assert len(set(said)) == 1, said
    text = said[0] or ""
    assert text.startswith(f"TrainingError: step {step}: ranks run different parts of the model"), text
    assert what in text
    assert "HINT: draw what is left out from a generator with the same seed" in text


@pytest.mark.parametrize(
    "words",
    [
        f"--model.name {MODELS}:Dropped --model.args.same true",
        f"--model.name {MODELS}:Dropped --model.args.same true --train.micro_batch 3 --mesh.accumulate every",
        f"--model.name {MODELS}:InTurn --train.micro_batch 3 --mesh.accumulate last",
    ],
)
def test_what_all_ranks_leave_out_is_no_alarm(words: str, tmp_path: Path) -> None:
    assert len(
        run(2, tmp_path / "run", words, "--train.eval_every_steps 5 --data.name tests.core.own:vectors_with_heldout").records
    )
