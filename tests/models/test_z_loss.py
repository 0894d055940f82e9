"""--train.z_loss: the squared log of the logits' sum of exponentials, weighted, beside the cross entropy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.config import load
from fsdp.models.chunked_loss import ChunkedHead
from fsdp.models.cross_entropy import LossParts, cross_entropy_parts, summed_entropy
from fsdp.models.loss import LossFunction
from fsdp.models.transformer import Transformer, TransformerSizes
from tests.support.runs import failures, run

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


@pytest.mark.slow
@pytest.mark.long
def test_compiled_code_gives_the_same() -> None:
    logits = torch.randn(20, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(20) % 11
    targets[3:6] = -100
    found = []
    for summed in (summed_entropy, torch.compile(summed_entropy)):
        leaf = logits.clone().requires_grad_()
        valid = torch.ones(20, dtype=torch.bool)
        loss = cross_entropy_parts(leaf, targets, valid, summed=summed, z_loss=WEIGHT).loss_sum
        loss.backward()
        found.append((float(loss.detach()), leaf.grad))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-13)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-12, atol=1e-14)


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


def test_a_run_keeps_its_logits_smaller_on_any_ranks(tmp_path: Path) -> None:
    def finished(name: str, ranks: int, words: str = "") -> Any:
        return run(ranks, tmp_path / name, BASE, words)

    def normalizers(parameters: dict[str, Tensor]) -> float:
        sizes = TransformerSizes(vocab_size=31, width=24, layers=2, heads=2, ffn=22, max_seq_len=9)
        model = Transformer(sizes).double()
        model.load_state_dict(parameters)
        return float(model(TOKENS % 31).detach().logsumexp(-1).square().mean())

    free, held = finished("free", 2), finished("held", 2, f"--train.z_loss {WEIGHT}")
    assert normalizers(held.parameters) < 0.9 * normalizers(free.parameters)
    split = finished("split", 1, f"--train.z_loss {WEIGHT} --train.micro_batch 3 --memory.loss_chunk 7")
    ours, theirs = ([r["loss"] for r in one.records if "loss" in r] for one in (split, held))
    assert ours == pytest.approx(theirs, rel=1e-12)


def test_a_loss_without_logits_is_refused(tmp_path: Path) -> None:
    words = "--model.name tests.support.user_code:OwnLoss --data.name tests.support.user_code:vectors"
    said = failures(2, tmp_path, f"{words} --train.steps 1 --train.z_loss 0.001")
    for line in said:
        assert line is not None
        assert line.startswith("ConfigError: --train.z_loss 0.001 needs logits")
        assert line.endswith("HINT: --train.z_loss 0")


def test_a_loss_of_one_s_own_is_refused_beside_it() -> None:
    with pytest.raises(ConfigError, match=r"--train\.z_loss 0\.001 and --train\.loss mine:loss do not go"):
        load(["--train.z_loss", "0.001", "--train.loss", "mine:loss"])
