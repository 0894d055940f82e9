"""Output layer and cross entropy in chunks of tokens: loss and gradients as of whole logits, less memory."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp.base.errors import ConfigError
from fsdp.models import chunked_loss
from fsdp.models.chunked_loss import ChunkedHead
from fsdp.models.loss import LossFunction, LossParts
from fsdp.models.transformer import Transformer, TransformerSizes
from tests.models.test_transformer import Bytes

SIZES = TransformerSizes(vocab_size=37, width=16, layers=1, heads=2, max_seq_len=9)
TOKENS = torch.randint(0, 37, (3, 9), generator=torch.Generator().manual_seed(1))
TARGETS = torch.where(torch.arange(9) < torch.tensor([[9], [4], [7]]), TOKENS.roll(-1, 1), -100)
VALID = torch.tensor([True, True, False])
DATA = {"inputs": TOKENS, "targets": TARGETS}


def transformer(**sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    return Transformer(TransformerSizes(**{**vars(SIZES), **sizes})).double()


def parts_of(model: nn.Module, chunk: int, **more: Any) -> LossParts:
    head = ChunkedHead(model, chunk, **more) if chunk else None
    return LossFunction(model, head=head)(model, DATA, VALID, 2)


def gradients(model: nn.Module, chunk: int, scale: float = 0.25) -> tuple[Tensor, dict[str, Tensor]]:
    loss = parts_of(model, chunk).loss_sum
    (loss * scale).backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).norm() / theirs[n].norm().clamp(min=1e-30)) for n in theirs)


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lm_head = nn.Embedding(37, 8), nn.Linear(8, 37)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": self.lm_head(self.table(tokens).tanh())}


@pytest.mark.parametrize("chunk", [1, 5, 9, 1000])
@pytest.mark.parametrize("make", [transformer, lambda: transformer(tied=True), lambda: Biased().double()])
def test_loss_and_gradients_are_those_of_whole_logits(make: Any, chunk: int) -> None:
    torch.manual_seed(0)
    whole, chunked = make(), make()
    chunked.load_state_dict(whole.state_dict())
    (expected, theirs), (loss, ours) = gradients(whole, 0), gradients(chunked, chunk)
    assert float(loss) == pytest.approx(float(expected), rel=1e-13)
    assert worst(ours, theirs) < 1e-12


@pytest.mark.parametrize("training", [True, False])
def test_each_row_has_its_part_of_the_sum(training: bool) -> None:
    """As the losses of a mixture's sources need it. The row that is padding has nothing."""
    model = transformer()
    loss = LossFunction(model, head=ChunkedHead(model, 5))
    loss.per_row = True
    with torch.set_grad_enabled(training):
        found = loss(model, DATA, VALID, 2)
    scores = transformer()(TOKENS).detach().log_softmax(-1)
    each = [
        [-float(scores[row, at, target]) for at, target in enumerate(targets) if target >= 0]
        for row, targets in enumerate(TARGETS.tolist()[:2])
    ]
    assert found.rows is not None
    sums, counts = found.rows
    assert sums.tolist() == pytest.approx([*(sum(row) for row in each), 0.0], rel=1e-12)
    assert counts.tolist() == [9, 4, 0]
    assert float(found.loss_sum.detach()) == pytest.approx(float(sums.sum()), rel=1e-12)


# ---------------------------------------------------------------- memory


class _Peak(TorchDispatchMode):
    """The largest sum of bytes that operations made and that were alive together."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self._known:
                storage = tensor.untyped_storage()
                self._known.add(key)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, key, storage.nbytes())
        return made

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def test_logits_never_exist_whole() -> None:
    def peak(chunk: int) -> int:
        torch.manual_seed(0)
        model = Transformer(TransformerSizes(vocab_size=4096, width=16, layers=1, heads=2, max_seq_len=256))
        tokens = torch.randint(0, 4096, (2, 256))
        head = ChunkedHead(model, chunk) if chunk else None
        with _Peak() as counted:
            parts = LossFunction(model, head=head)(
                model, {"inputs": tokens, "targets": tokens}, torch.ones(2, dtype=torch.bool), 2
            )
            parts.loss_sum.backward()
        return counted.peak

    logits = 2 * 256 * 4096 * 4
    assert peak(0) > 2 * logits
    assert peak(32) < logits / 2


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 16), (torch.bfloat16, 28)])
def test_a_gradient_passes_over_its_logits_as_seldom_as_it_can(dtype: torch.dtype, size: int) -> None:
    """log_softmax reads and writes, exp reads and writes; bf16 is widened before and rounded after them."""
    logits = torch.randn(27, 4096, dtype=dtype)
    with Bytes() as counted:
        chunked_loss._part(logits, TARGETS.view(-1), None, 0.0)
    assert size <= counted.moved / (27 * 4096) < size + 0.1


def test_low_precision_rounds_the_sum_of_all_chunks() -> None:
    """In pieces of the classes or not."""
    (_, exact), model = gradients(transformer(), 5), transformer().bfloat16()
    with mock.patch.object(chunked_loss, "PIECE", 16):
        _, pieces = gradients(transformer().bfloat16(), 5)
    whole = gradients(model, 5)[1]
    assert all(torch.equal(pieces[name], grad) for name, grad in whole.items())
    assert float((whole["head.weight"] - exact["head.weight"]).norm() / exact["head.weight"].norm()) < 0.02


# ---------------------------------------------------------------- refusals


class Capped(Biased):
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": super().forward(tokens)["logits"].tanh()}


class Unused(Biased):
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": F.linear(self.table(tokens), self.lm_head.weight)}


class Last(Biased):
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": self.lm_head(self.table(tokens[:, -1:]))}


class OwnLoss(Biased):
    def forward(self, tokens: Tensor, targets: Tensor) -> Any:  # type: ignore[override]
        return super().forward(tokens)["logits"].mean()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Capped(), "the model's forward changes the logits of lm_head, and the loss is computed there"),
        (Unused(), "the model's forward does not call lm_head"),
        (Last(), "lm_head receives other positions than the targets'"),
        (OwnLoss(), "the model computes a loss of its own from targets"),
    ],
)
def test_a_model_that_the_loss_does_not_fit_is_refused(model: nn.Module, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        parts_of(model, 5)
    assert "--memory.loss_chunk 0" in str(refused.value)


# ---------------------------------------------------------------- a model of transformers
