"""Models of transformers with labels of their own, padded and masked: each unmasked label has the same
weight, on any number of ranks and micro-batches. Held against a loop that takes the whole global batch at
once, and shares with the product the initial weights and the samples.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp.data import Cursor, build_dataset
from fsdp.models import build_real, resolve
from tests.support.marks import sample_are
from tests.support.plain_loop import relative_difference
from tests.support.runs import run, settings

pytestmark = [pytest.mark.slow, pytest.mark.needs("transformers")]  # importing transformers takes seconds

STEPS, BATCH = 4, 7
RATES = {"t5": 0.005}
"""0.05 for the others. T5 takes the variance of its norms in float32, whose rounding differs with the factor
of the gradients (3 ranks: 2e-9 after steps of 0.05).
"""
FLAGS = (
    f"--train.steps {STEPS} --train.global_batch {BATCH} --train.clip_grad_norm 0 --precision.master fp64 "
    "--optim.name sgd "
    "--optim.momentum 0 --optim.schedule constant --optim.warmup_steps 0"
)
KINDS = {
    "llama": "causal", "gpt2": "causal", "bert": "masked", "t5": "seq2seq", "mixtral": "causal",
    "classifier": "classes",
}  # fmt: skip
CASES = [(model, ranks, micro) for model in KINDS for ranks in (1, 2, 3) for micro in (1, 2)]
SAMPLE = [
    ("llama", 2, 2),
    ("gpt2", 3, 1),
    ("bert", 2, 2),
    ("t5", 2, 1),
    ("mixtral", 2, 2),
    ("classifier", 3, 2),
]


def words_of(model: str, data: str = "texts") -> str:
    named = f"--model.name tests.models.small_hf:{model} --data.name tests.models.small_hf:{data}"
    return f"{named} --data.args.kind {KINDS[model]} --optim.lr {rate_of(model)} {FLAGS}"


def rate_of(model: str) -> float:
    return RATES.get(model, 0.05)


def plain_loss(model: nn.Module, batch: Mapping[str, Tensor], kind: str, pieces: list[np.ndarray]) -> Tensor:
    """The mean over the whole batch's labels; an auxiliary loss is each piece's, their mean weighed by
    labels.
    """
    given = {"labels": batch["labels"]} if kind == "seq2seq" else {}
    labels = batch["labels"][:, 1:] if kind == "causal" else batch["labels"]
    total, count = torch.zeros((), dtype=torch.float64), (labels != -100).sum()
    for rows in pieces:
        output = model(
            batch["inputs"][rows],
            attention_mask=batch["attention_mask"][rows],
            **{k: v[rows] for k, v in given.items()},
        )
        logits = output.logits[:, :-1] if kind == "causal" else output.logits
        total = total + F.cross_entropy(logits.flatten(0, -2), labels[rows].flatten(), reduction="sum")
        if getattr(output, "aux_loss", None) is not None:
            total = total + 0.5 * output.aux_loss * (labels[rows] != -100).sum()
    return total / count


@functools.cache
def plain(model: str, ranks: int, micro: int) -> tuple[dict[str, Tensor], list[float]]:
    config = settings(words_of(model))
    data = build_dataset(config.data)
    module = build_real(resolve(config.model, data.info.facts), config.run.seed).double()
    cursor = Cursor(seed=config.run.seed, samples=len(data.train), global_batch=BATCH)
    pieces = [part for own in np.array_split(np.arange(BATCH), ranks) for part in np.array_split(own, micro)]
    losses = []
    for step in range(STEPS):
        module.zero_grad()
        loss = plain_loss(module, data.train.batch(cursor.indices(step)), KINDS[model], pieces)
        loss.backward()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(rate_of(model) * parameter.grad)
        losses.append(float(loss.detach()))
    return {name: p.detach() for name, p in module.named_parameters()}, losses


def cut(model: str, ranks: int, micro: int) -> tuple[int, int]:
    """What the reference depends on: where there is no auxiliary loss, on no cut at all."""
    return (ranks, micro) if model == "mixtral" else (1, 1)


@pytest.mark.parametrize(("model", "ranks", "micro"), sample_are(SAMPLE, CASES))
def test_each_label_weighs_the_same(model: str, ranks: int, micro: int, tmp_path: Path) -> None:
    parameters, losses = plain(model, *cut(model, ranks, micro))
    share = -(-BATCH // ranks)
    finished = run(ranks, tmp_path, words_of(model), f"--train.micro_batch {-(-share // micro)}")
    steps = [record for record in finished.records if "grad_norm" in record]
    assert [record["loss"] for record in steps] == pytest.approx(losses, rel=1e-9)
    assert relative_difference(finished.parameters, parameters) <= 1e-9


def test_evaluation_weighs_as_training_does(tmp_path: Path) -> None:
    """11 padded texts on 2 ranks in batches of 3, after the last step."""
    words = words_of("llama", "texts_with_heldout")
    finished = run(2, tmp_path, words, "--train.eval_batch 3")
    config = settings(words)
    data = build_dataset(config.data)
    model = build_real(resolve(config.model, data.info.facts), config.run.seed).double()
    model.load_state_dict(finished.parameters, strict=False)
    assert data.heldout is not None
    batch = data.heldout.batch(np.arange(11))
    with torch.no_grad():
        expected = plain_loss(model, batch, "causal", [np.arange(11)])
    assert finished.records[-1]["eval_loss"] == pytest.approx(float(expected), rel=1e-6)
