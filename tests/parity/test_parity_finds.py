"""python -m fsdp.parity with default flags finds each broken reduction, and nothing if none is broken."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from fsdp.parity.__main__ import Comparison, Judge, ParityDifference, ParityOptions, Row, job_of, rows
from tests.parity.breaks import BREAKS, train_broken
from tests.support import needs
from tests.support.marks import sample_are
from tests.support.world import run_world

pytestmark = pytest.mark.slow

OWN = "tests.support.user_code"
UNUSUAL = "tests.models.unusual"
VECTORS = f"--model.name {OWN}:Uneven --data.name {OWN}:vectors --train.global_batch 12"
WORDS = f"--model.name {OWN}:TiedWords --data.name {OWN}:sentences --train.global_batch 12"
PICTURES = "--train.global_batch 7 --data.name tests.models.small_hf:pictures"
TEXTS = "--train.global_batch 7 --data.name tests.models.small_hf:texts"
CPU = torch.device("cpu")
QUIET = " --watch.enabled false"
RIGHT = {
    "gemma 3": f"{TEXTS} --model.name tests.models.small_hf:gemma3 --data.args.kind causal",
    "vit": f"{PICTURES} --model.name tests.models.small_hf:vit",
    "mixtral": f"{TEXTS} --model.name tests.models.small_hf:mixtral --data.args.kind causal",
    "t5": f"{TEXTS} --model.name tests.models.small_hf:t5 --data.args.kind seq2seq",
    "own loss": f"--train.global_batch 12 --model.name {OWN}:OwnLoss --data.name {OWN}:vectors",
    "no targets": f"--train.global_batch 12 --model.name {UNUSUAL}:Rebuilds --data.name {UNUSUAL}:numbers",
    "segmentation": f"--train.global_batch 12 --model.name {UNUSUAL}:Segments --data.name {UNUSUAL}:masks",
    "z-loss": f"{WORDS} --train.z_loss 0.01",
}
WRONG = [name for name in BREAKS if name != "nothing"]
ONLY = {"sum and mean exchanged": {"fsdp", "hsdp"}, "replicas not averaged": {"hsdp"}}
"""The strategies whose meshes differ, where others have no such reduction."""


def options(words: str) -> ParityOptions:
    return ParityOptions((words + QUIET).split(), ranks=2, dtype="fp64", steps=20)


@functools.cache
def judge(words: str) -> Judge:
    return Judge(options(words), job_of(options(words), CPU), CPU)


def differences(words: str, name: str, folder: Path) -> dict[Row, list[ParityDifference]]:
    """The differences that the command prints below each mesh."""
    known, tried = judge(words), rows(2)
    run_world(2, train_broken, name, options(words), tried, str(folder))
    found = {row: known.differences(row, f"{folder}/{number}") for number, row in enumerate(tried)}
    return {row: [d for d in differences if d.size > d.bound] for row, differences in found.items()}


@pytest.mark.long
@pytest.mark.parametrize("name", sample_are(["twice"], WRONG))
def test_a_broken_reduction_is_found(name: str, tmp_path: Path) -> None:
    found = differences(WORDS if "tokens" in name else VECTORS, name, tmp_path)
    assert any(found.values())
    if name == "twice":
        for row, apart in found.items():
            first = [d for d in apart if d.training is Comparison.GRADIENT]
            assert [d.size for d in first] == pytest.approx([1.0, 1.0]), row  # the norm, and the gradient
    if name in ONLY:
        assert {row.sizes.strategy for row, apart in found.items() if apart} == ONLY[name]


@pytest.mark.parametrize("name", sample_are([], RIGHT))
def test_a_correct_run_has_no_difference(name: str, tmp_path: Path) -> None:
    if "small_hf" in RIGHT[name]:
        needs.check("transformers")
    assert not any(differences(RIGHT[name], "nothing", tmp_path).values())


@pytest.mark.long
@pytest.mark.needs("transformers")
def test_notes_explain_why_a_model_is_not_exact(capsys: pytest.CaptureFixture[str]) -> None:
    judge.__wrapped__(RIGHT["gemma 3"]), judge.__wrapped__(RIGHT["vit"])
    first, second = capsys.readouterr().err.splitlines()
    assert "float32 inside" in first
    assert "vit.layers.0.attention.k_proj.bias" in second
    assert "not in 'configured'" in second
