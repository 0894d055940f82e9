"""Models of transformers with labels of their own, padded and masked: each unmasked label has the same
weight, on any number of ranks and micro-batches. Held against a loop that takes the whole global batch at
once, and shares with the product the initial weights and the samples.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fsdp.data import build_dataset
from fsdp.models import build_real, resolve
from tests.models.foreign import differences, plain_loss, words_of
from tests.support.marks import sample_are
from tests.support.runs import run, settings

pytestmark = [pytest.mark.slow, pytest.mark.needs("transformers")]  # importing transformers takes seconds

MODELS = ("llama", "gpt2", "bert", "t5", "mixtral", "classifier")
CASES = [(model, ranks, micro) for model in MODELS for ranks in (1, 2, 3) for micro in (1, 2)]
SAMPLE = [("t5", 2, 1), ("classifier", 3, 2)]


@pytest.mark.parametrize(("model", "ranks", "micro"), sample_are(SAMPLE, CASES))
def test_each_label_weighs_the_same(model: str, ranks: int, micro: int, tmp_path: Path) -> None:
    assert max(differences(model, ranks, micro, tmp_path)) <= 1e-9


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
        _, expected = plain_loss(model, batch, "causal", [np.arange(11)])
    assert finished.records[-1]["eval_loss"] == pytest.approx(expected, rel=1e-6)
