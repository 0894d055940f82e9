"""--train.z_loss: the squared log of the logits' sum of exponentials, weighted, beside the cross entropy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fsdp.models.chunked_loss import ChunkedHead
from fsdp.models.loss import LossFunction, LossParts, cross_entropy_parts
from fsdp.models.transformer import Transformer, TransformerSizes
from tests.support.runs import failures

WEIGHT = 0.05
TOKENS = torch.randint(0, 37, (3, 9), generator=torch.Generator().manual_seed(1))
TARGETS = torch.where(torch.arange(9) < torch.tensor([[9], [4], [7]]), TOKENS.roll(-1, 1), -100)
KEPT = (TARGETS != -100) & torch.tensor([[True], [True], [False]])


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return Transformer(TransformerSizes(vocab_size=37, width=16, layers=1, heads=2, max_seq_len=9)).double()


def parts_of(model: nn.Module, chunk: int, weight: float, *, rows: bool = False) -> LossParts:
    head = ChunkedHead(model, chunk, z_loss=weight) if chunk else None
    function = LossFunction(model, head=head, z_loss=weight)
    function.per_row = rows
    return function(model, {"inputs": TOKENS, "targets": TARGETS}, KEPT.any(1), 2)


def by_hand(model: nn.Module) -> Tensor:
    logits = model(TOKENS)[KEPT]
    entropy = nn.functional.cross_entropy(logits, TARGETS[KEPT], reduction="sum")
    return entropy + WEIGHT * (logits.logsumexp(-1) ** 2).sum()


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("chunk", [0, 1, 5, 1000])
def test_loss_and_gradients_are_those_by_hand(chunk: int, rows: bool) -> None:
    model, plain = transformer(), transformer()
    expected, parts = by_hand(plain), parts_of(model, chunk, WEIGHT, rows=rows)
    expected.backward()
    parts.loss_sum.backward()
    assert float(parts.loss_sum.detach()) == pytest.approx(float(expected.detach()), rel=1e-13)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad - theirs.grad).norm() <= 1e-12 * theirs.grad.norm()


@pytest.mark.parametrize("chunk", [0, 5])
def test_an_evaluation_and_the_losses_of_rows_leave_it_out(chunk: int) -> None:
    with torch.no_grad():
        with_it, without = (parts_of(transformer(), chunk, weight) for weight in (WEIGHT, 0.0))
    assert torch.equal(with_it.loss_sum, without.loss_sum)
    ours, theirs = (parts_of(transformer(), chunk, weight, rows=True) for weight in (WEIGHT, 0.0))
    assert ours.rows is not None
    assert theirs.rows is not None
    assert torch.equal(ours.rows[0], theirs.rows[0])
    assert ours.loss_sum > theirs.loss_sum


@pytest.mark.parametrize("rows", [False, True])
def test_backward_keeps_no_second_copy_of_the_logits(rows: bool) -> None:
    """One log-softmax, as without: the normalizers come from it."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    logits = torch.randn(50, 1000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        valid = torch.ones(50, dtype=torch.bool)
        cross_entropy_parts(logits * 1.0, torch.arange(50), valid, per_row=rows, z_loss=WEIGHT)
    assert sum(size >= logits.nbytes for size in kept.values()) == 1


BASE = (
    "--data.name tests.support.user_code:sentences --model.name transformer --model.args.vocab_size 31 "
    "--model.args.width 24 --model.args.heads 2 --model.args.layers 2 --model.args.ffn 22 "
    "--model.args.max_seq_len 9 --train.steps 20 --optim.lr 0.02 --optim.warmup_steps 0 "
    "--precision.master fp64"
)


def test_a_loss_without_logits_is_refused(tmp_path: Path) -> None:
    words = "--model.name tests.support.user_code:OwnLoss --data.name tests.support.user_code:vectors"
    said = failures(2, tmp_path, f"{words} --train.steps 1 --train.z_loss 0.001")
    for line in said:
        assert line is not None
        assert line.startswith("ConfigError: --train.z_loss 0.001 needs logits")
        assert line.endswith("HINT: --train.z_loss 0")
