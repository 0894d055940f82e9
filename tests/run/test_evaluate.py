"""Evaluation with the same sharded model: each held-out sample once, and training afterwards as if it had not
been.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fsdp.run.evaluate import Evaluation
from tests.support.marks import quick_are
from tests.support.plain_loop import relative_difference, train_plainly
from tests.support.runs import run, settings
from tests.support.user_code import Buffers, Vectors, uneven_from

HELD = "--data.name tests.support.user_code:vectors_with_heldout --precision.master fp64"
HSDP = "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2"
WAYS = {
    "alone": (1, ""),
    "zero-3": (3, ""),
    "zero-2": (2, "--mesh.reshard_after_forward false"),
    "hsdp": (4, HSDP),
    "ddp": (2, "--mesh.strategy ddp"),
}


@pytest.mark.parametrize("way", quick_are(["zero-3"], WAYS, []))
def test_evaluation_numbers_and_unchanged_training_after(way: str, tmp_path: Path) -> None:
    """23 samples in batches of 4 a rank: the last are padded. Evaluated each third step, parameters are as
    without.
    """
    ranks, words = WAYS[way]
    finished = run(ranks, tmp_path, HELD, words, "--train.eval_every_steps 3 --train.eval_batch 4")
    plain = train_plainly(settings(HELD), dtype="fp64")
    assert relative_difference(finished.parameters, plain.parameters) <= 1e-10
    said = [record for record in finished.records if "eval_loss" in record]
    assert [record["step"] for record in said] == [3, 6, 9, 12, 15, 18, 20]
    heldout = Vectors(23)
    logits = uneven_from(finished.parameters)(heldout.inputs.double())
    assert said[-1]["eval_loss"] == pytest.approx(float(F.cross_entropy(logits, heldout.targets)), rel=1e-10)
    assert said[-1]["eval_accuracy"] == float((logits.argmax(-1) == heldout.targets).double().mean())


@pytest.mark.long
@pytest.mark.slow
def test_a_part_of_the_held_out_data(tmp_path: Path) -> None:
    finished = run(3, tmp_path, HELD, "--train.eval_samples 7")
    chosen = torch.arange(7) * 23 // 7
    heldout = Vectors(23)
    logits = uneven_from(finished.parameters)(heldout.inputs[chosen].double())
    assert finished.records[-1]["eval_loss"] == pytest.approx(
        float(F.cross_entropy(logits, heldout.targets[chosen])), rel=1e-10
    )


@pytest.mark.parametrize("mesh", ["fsdp", "ddp"])
def test_batch_norm_is_evaluated_with_the_statistics_that_are_exported(mesh: str, tmp_path: Path) -> None:
    """Each rank has its own; training goes on with them, so evaluations in between change nothing."""
    model = "--model.name tests.support.user_code:Buffers --model.frozen blocks.*"
    words = f"{HELD} {model} --mesh.strategy {mesh}"
    without = run(2, tmp_path / "without", words)
    finished = run(2, tmp_path / "with", words, "--train.eval_every_steps 7")
    assert all(torch.equal(finished.parameters[name], value) for name, value in without.parameters.items())
    exported = Buffers().double()
    exported.load_state_dict(finished.parameters)
    heldout = Vectors(23)
    with torch.no_grad():
        loss = F.cross_entropy(exported.eval()(heldout.inputs.double()), heldout.targets)
    assert finished.records[-1]["eval_loss"] == pytest.approx(float(loss), rel=1e-10)


def test_perplexity_is_of_tokens_alone() -> None:
    evaluation = Evaluation(2.0, 0.5, None, of_tokens=True, averaged=Evaluation(800.0, None, None, True))
    values = evaluation.values()
    assert values["eval_perplexity"] == math.exp(2.0)
    assert values["eval_ema_perplexity"] == math.inf
    assert "eval_perplexity" not in Evaluation(2.0, 0.5, None).values()
