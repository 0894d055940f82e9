"""python -m fsdp.parity with default flags finds each broken reduction, and nothing if none is broken."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fsdp.parity.__main__ import (
    Comparison,
    Judge,
    ParityDifference,
    ParityOptions,
    Row,
    axis_rows,
    job_of,
    refusal,
    rows,
)
from tests.models.exact_hf import MORE, narrowed, widened
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
OF_AXES = {
    "an average for a sum": ("Qwen3", 2, (1, 2, 1)),
    "norms drift": ("Llama", 2, (1, 2, 1)),
    "window ignored": ("Mistral", 2, (2, 1, 1)),
    "another order": ("transformer", 2, (2, 1, 1)),
    "experts not reduced": ("Mixtral", 4, (1, 1, 2)),
}
"""The model, the ranks, and the sizes of context, tensor and expert."""
WRONG = [name for name in BREAKS if name != "nothing" and name not in OF_AXES]
ONLY = {"sum and mean exchanged": {"fsdp", "hsdp"}, "replicas not averaged": {"hsdp"}}
"""The strategies whose meshes differ, where others have no such reduction."""


TRANSFORMER = (
    f"--model.name transformer --data.name {OWN}:sentences --train.global_batch 7 --model.args.width 32 "
    "--model.args.heads 4 --model.args.kv_heads 2 --model.args.vocab_size 32 --model.args.max_seq_len 16 "
    "--model.args.layers 2"
)


@pytest.fixture(autouse=True)
def others_are_as_narrow_as_before() -> Iterator[None]:
    yield
    narrowed()


def words_of(kind: str) -> str:
    if kind == "transformer":
        return TRANSFORMER
    needs.check("transformers")
    widened(kind)
    model = f"--model.name tests.models.exact_hf:build --model.args.kind {kind}"
    return f"{model} --data.name tests.models.exact_hf:rows --train.global_batch 7"


def options(words: str, ranks: int = 2) -> ParityOptions:
    return ParityOptions((words + QUIET).split(), ranks=ranks, dtype="fp64", steps=20)


@functools.cache
def judge(words: str, ranks: int = 2) -> Judge:
    return Judge(options(words, ranks), job_of(options(words, ranks), CPU), CPU)


def differences(
    words: str, name: str, folder: Path, ranks: int = 2, meshes: list[Row] | None = None
) -> dict[Row, list[ParityDifference]]:
    """The differences that the command prints below each mesh."""
    known, tried = judge(words, ranks), meshes or rows(2)
    run_world(ranks, train_broken, name, options(words, ranks), tried, str(folder), timeout_s=300)
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


@pytest.mark.long
@pytest.mark.parametrize("name", OF_AXES)
def test_what_breaks_an_axis_is_found_on_each_of_its_meshes(name: str, tmp_path: Path) -> None:
    kind, ranks, axes = OF_AXES[name]
    tried = axis_rows(ranks, axes)[:2]
    assert all(differences(words_of(kind), name, tmp_path, ranks, tried).values())


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["transformer", *MORE])
def test_each_axis_of_a_model_trains_as_one_process_does(kind: str, ranks: int, tmp_path: Path) -> None:
    """Of transformers with norms and routers in float64."""
    possible = [row for row in axis_rows(ranks) if not refusal(options(words_of(kind), ranks), row, "cpu")]
    mixture = {"context", "expert"} | ({"expert tensor"} if ranks == 4 else set())
    dense = {"context", "tensor"} | ({"context tensor"} if ranks == 4 else set())
    axes = {" ".join(sorted(row.axes)) for row in possible}
    assert axes == (mixture if kind in ("Mixtral", "Qwen3Moe", "DeepseekV3") else dense)
    assert not any(differences(words_of(kind), "nothing", tmp_path, ranks, possible).values())


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
