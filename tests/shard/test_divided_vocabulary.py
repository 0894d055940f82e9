"""The cross entropy of logits whose classes are divided over tensor ranks, against torch's of whole ones; and
that no rank holds whole logits.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fsdp.distributed.env import DistEnv
from fsdp.models.loss import cross_entropy_parts, summed_entropy
from fsdp.models.registry import IGNORED
from fsdp.shard.tensor import DividedVocabulary
from tests.support.marks import quick_are
from tests.support.runs import flags, on_a_rank
from tests.support.world import run_world

ROWS, CLASSES, Z = 6, 10, 0.3


def parts_of(
    logits: Tensor, targets: Tensor, vocabulary: DividedVocabulary | None
) -> tuple[list[Tensor], Tensor]:
    logits = logits.detach().requires_grad_()
    valid = torch.tensor([True, True, False])
    parts = cross_entropy_parts(logits, targets, valid, summed_entropy, True, Z, vocabulary)
    parts.loss_sum.backward()
    with torch.no_grad():
        evaluated = cross_entropy_parts(logits, targets, valid, summed_entropy, False, Z, vocabulary)
    assert parts.rows is not None
    assert evaluated.correct is not None
    assert logits.grad is not None
    return [parts.loss_sum.detach(), *parts.rows, evaluated.loss_sum, evaluated.correct.double()], logits.grad


def differences(env: DistEnv) -> list[float]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 2, CLASSES, generator=generator, dtype=torch.float64) * 30
    logits[0, 0] = 1.0  # several largest: the first one is predicted
    targets = torch.tensor([[0, CLASSES - 1], [IGNORED, 4], [5, 6]])
    own = slice(env.rank * CLASSES // 2, (env.rank + 1) * CLASSES // 2)
    assert dist.group.WORLD is not None
    numbers, gradient = parts_of(logits[..., own], targets, DividedVocabulary(dist.group.WORLD))
    whole, expected = parts_of(logits, targets, None)
    sizes = [float((a - b).abs().max()) for a, b in zip(numbers, whole, strict=True)]
    return [*sizes, float((gradient - expected[..., own]).abs().max())]


def test_the_loss_of_divided_classes_is_that_of_whole_ones() -> None:
    for found in run_world(2, differences):
        assert max(found) < 1e-12, found


def counted(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    assert output.shape[-1] == 32, output.shape
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten(), reduction="none").view(4, -1)


def classes_of(env: DistEnv, words: list[str]) -> set[int]:
    losses, found = DividedVocabulary.losses, set[int]()

    def seen(self: DividedVocabulary, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        found.add(logits.shape[-1])
        return losses(self, logits, targets)

    with mock.patch.object(DividedVocabulary, "losses", seen):
        assert on_a_rank(env, words) is None
    return found


CASES: list[tuple[str, set[int]]] = [("", {16}), (f"--train.loss {__name__}:counted", set())]


@pytest.mark.parametrize(("loss", "classes"), quick_are(CASES[:1], CASES, []))
def test_a_rank_has_its_classes_and_a_loss_of_the_user_all(
    loss: str, classes: set[int], tmp_path: Path
) -> None:
    words = "--model.name transformer --data.name synthetic --data.args.kind tokens --mesh.tensor 2"
    more = "--data.args.vocab_size 32 --data.seq_len 8 --train.global_batch 4 --train.steps 1"
    run_flags = ["--run.dir", str(tmp_path / "run"), *flags(words, more, loss)]
    assert run_world(2, classes_of, run_flags) == [classes] * 2
