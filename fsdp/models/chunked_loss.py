"""Output layer and cross entropy in chunks of tokens, `--memory.loss_chunk N`: logits of N tokens exist at
once.

The output layer's forward returns the sum of the losses in place of logits while `ChunkedHead.summing` is
active. The computation is inside the layer's forward, where FSDP has gathered its weight; tied weights stay
one parameter. Gradients of input and weight are computed in the forward, chunk by chunk, so no product is
repeated. The weight's gradient is summed in at least fp32.

Forward and backward of 2048 tokens of width 512 and 32,000 classes on one CPU core, torch 2.13, seconds and
largest bytes beside the arguments: whole 3.9 s and 813 MiB in fp32, 4.1 s and 781 MiB in bf16; chunks of 256
4.3 s and 227 MiB, 2.7 s and 192 MiB. torch.nn.functional.linear_cross_entropy, which torch has from 2.13 on,
takes 7.6 s and 133 MiB in fp32 with its own choice of chunks, 5.2 s with batch_chunk_size 256.

Inductor's count of a compiled chunk is 16 bytes a logit in fp32 and 8 in bf16. Whole logits (loss.py) move as
many in forward and backward; with the gradient in forward, which backward multiplies by the loss's own, they
would move 24 and 12 (torch 2.13, 512 × 8192 logits), so that loss has its gradient in backward. torch's
addmm(out_dtype=), which would add bf16 products to an fp32 sum, is for CUDA alone, and some versions refuse
an fp32 input.
Not here: which targets are masked (loss.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fsdp.base.errors import ConfigError
from fsdp.models.registry import IGNORED

FLAG = "--memory.loss_chunk"
WHOLE = f"{FLAG} 0"
ChunkPart = Callable[[Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor | None, Tensor]]


@dataclass(frozen=True)
class ChunkedSums:
    """The sum of the losses; outside training, also the number of right predictions. `losses`: the loss of
    each target, without a gradient, where `summing` was called with per_target.
    """

    loss_sum: Tensor
    correct: Tensor | None
    losses: Tensor | None = None


def output_layer(model: nn.Module) -> tuple[str, nn.Linear]:
    """Returns the layer whose output is the logits: get_output_embeddings(), or `head`, or `lm_head`."""
    getter: Any = getattr(model, "get_output_embeddings", lambda: None)
    layers = [getter(), getattr(model, "head", None), getattr(model, "lm_head", None)]
    layer = next((layer for layer in layers if layer is not None), None)
    name = next((name for name, module in model.named_modules() if module is layer), "")
    if type(layer) is nn.Linear and name:
        return name, layer
    raise ConfigError(
        f"{FLAG} needs a model whose output layer (head, lm_head, get_output_embeddings()) is an nn.Linear: "
        f"{name or 'it'} is {type(layer).__name__}.",
        WHOLE,
    )


class ChunkedHead:
    """The forward of a model's output layer, replaced on the instance: names and parameters stay."""

    def __init__(self, model: nn.Module, chunk: int, *, compiled: bool = False, z_loss: float = 0.0) -> None:
        """`compiled`: the elementwise part of a chunk is one compiled function. `z_loss`: --train.z_loss."""
        self.name, layer = output_layer(model)
        self._layer, self._chunk, self._z_loss = layer, chunk, z_loss
        self._part: ChunkPart = torch.compile(_part) if compiled else _part
        self._targets: Tensor | None = None
        self._per_target = False
        self._sums: ChunkedSums | None = None
        # Not a decorator: torch.compiler.disable would load the compiler at every start.
        self._uncompiled = torch.compiler.disable(self._summed)
        layer.forward = self._forward  # type: ignore[method-assign, assignment]

    @contextlib.contextmanager
    def summing(self, targets: Tensor, *, per_target: bool = False) -> Iterator[None]:
        """Context of one forward of the model: its output layer returns the sum of the losses. `per_target`
        keeps the loss of each target too.
        """
        self._targets, self._per_target, self._sums = targets, per_target, None
        try:
            yield
        finally:
            self._targets = None

    def take(self, *outputs: Tensor | None) -> ChunkedSums:
        """Returns the sums of the last forward. `outputs` must hold the layer's own: a model may scale or cap
        its logits.
        """
        sums, self._sums = self._sums, None
        if sums is None or not any(output is sums.loss_sum for output in outputs):
            what = "does not call" if sums is None else "changes the logits of"
            raise self.refusal(f"the model's forward {what} {self.name}, and the loss is computed there")
        return sums

    def refusal(self, why: str) -> ConfigError:
        return ConfigError(f"{FLAG} {self._chunk}: {why}.", WHOLE)

    def _forward(self, hidden: Tensor) -> Tensor:
        if self._targets is None:
            return F.linear(hidden, self._layer.weight, self._layer.bias)
        return self._uncompiled(hidden, self._targets)

    def _summed(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if self._sums is not None:
            raise self.refusal(f"{self.name} is called twice in a forward")
        if hidden.shape[:-1] != targets.shape:
            raise self.refusal(f"{self.name} receives other positions than the targets'")
        operands = (hidden.reshape(-1, hidden.shape[-1]), self._layer.weight, self._layer.bias)
        rows, weight, bias = (_autocast(operand, hidden.device.type) for operand in operands)
        sizes, flat = _chunk_sizes(targets.numel(), self._chunk), targets.reshape(-1)
        losses: Tensor | None = None
        if self._per_target:
            losses = torch.empty(targets.shape, dtype=_wide(weight.dtype), device=weight.device)
        with torch.autocast(hidden.device.type, enabled=False):
            if torch.is_grad_enabled():
                loss_sum = _Summed.apply(rows, weight, bias, flat, sizes, self._part, losses, self._z_loss)
                self._sums = ChunkedSums(loss_sum, None, losses)
            else:
                self._sums = _evaluated(rows, weight, bias, flat, sizes, losses)
        return self._sums.loss_sum


def _autocast(tensor: Any, device: str) -> Any:
    """The tensor in autocast's dtype, as a linear layer casts its own."""
    if tensor is None or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def _chunk_sizes(tokens: int, chunk: int) -> list[int]:
    """Nearly equal sizes of at most `chunk`: at most two shapes, so compiled code has at most two."""
    number = max(1, -(-tokens // chunk))
    size = max(1, -(-tokens // number))
    return [min(size, tokens - at) for at in range(0, tokens, size)] or [0]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunks(
    hidden: Tensor, targets: Tensor, each: Tensor | None, sizes: list[int]
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    pieces: Sequence[Any] = [None] * len(sizes) if each is None else each.view(-1).split(sizes)
    return zip(hidden.split(sizes), targets.split(sizes), pieces, strict=True)


def _evaluated(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    sizes: list[int],
    each: Tensor | None,
) -> ChunkedSums:
    losses, right = [], []
    for part, wanted, into in _chunks(hidden, targets, each, sizes):
        logits = F.linear(part, weight, bias)
        logits = logits.to(_wide(logits.dtype))
        reduction = "sum" if into is None else "none"
        loss = F.cross_entropy(logits, wanted, reduction=reduction, ignore_index=IGNORED)
        losses.append(loss if into is None else into.copy_(loss).sum())
        right.append((logits.argmax(-1) == wanted).sum())
    return ChunkedSums(torch.stack(losses).sum(), torch.stack(right).sum(), each)


def _part(
    logits: Tensor, targets: Tensor, into: Tensor | None, z_loss: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The loss of a chunk, whose targets' losses `into` keeps; what `z_loss` adds to it; and its gradient by
    the logits, in which rows without a target are to be masked.
    """
    scores = F.log_softmax(logits, dim=-1, dtype=_wide(logits.dtype))
    reduction = "sum" if into is None else "none"
    loss = F.nll_loss(scores, targets, reduction=reduction, ignore_index=IGNORED)
    loss = loss if into is None else into.copy_(loss).sum()
    classes = targets.unsqueeze(-1).clamp(min=0)
    # Of the targets alone, before the scores are overwritten: compiled, all gradients are one pass.
    at_target = scores.gather(-1, classes)
    own, gradient, extra = at_target.exp(), scores.exp_(), None
    if z_loss:
        normalizers = logits.gather(-1, classes) - at_target
        extra = z_loss * normalizers.masked_fill((targets == IGNORED).unsqueeze(-1), 0.0).square().sum()
        factor = 1 + 2 * z_loss * normalizers
        own, gradient = own * factor, gradient.mul_(factor)
    return loss, extra, gradient.to(logits.dtype).scatter_(-1, classes, (own - 1).to(logits.dtype))


class _Summed(torch.autograd.Function):
    """Computes the gradients in forward; backward multiplies them by the loss's own."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        sizes: list[int],
        part: ChunkPart,
        each: Tensor | None,
        z_loss: float,
    ) -> Tensor:
        wide = _wide(weight.dtype)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        by_hidden = torch.empty_like(hidden) if wants_hidden else None
        by_weight = torch.empty_like(weight, dtype=wide) if wants_weight else None
        by_bias = torch.zeros(len(weight), dtype=wide, device=weight.device) if wants_bias else None
        losses, at = [], 0
        for rows, wanted, into in _chunks(hidden, targets, each, sizes):
            loss, extra, gradient = part(F.linear(rows, weight, bias), wanted, into, z_loss)
            losses += [loss] if extra is None else [loss, extra]
            # On the side of few columns: a pass over all classes less.
            masked = (wanted == IGNORED).unsqueeze(-1)
            if by_hidden is not None:
                torch.mm(gradient, weight, out=by_hidden[at : at + len(rows)]).masked_fill_(masked, 0)
            if by_weight is not None:
                _add_product(by_weight, gradient, rows.masked_fill(masked, 0), first=not at)
            if by_bias is not None:
                by_bias += gradient.masked_fill_(masked, 0).sum(0, dtype=wide)
            at += len(rows)
        # Not saved for backward: hooks on saved tensors would move them to the host.
        ctx.gradients = (by_hidden, by_weight, by_bias)
        ctx.dtype = weight.dtype
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "a second backward through the same loss"
        by_input = [None if own is None else _scaled(own, gradient, ctx.dtype) for own in gradients]
        return (*by_input, None, None, None, None, None)


def _add_product(total: Tensor, gradient: Tensor, rows: Tensor, *, first: bool) -> None:
    """Adds gradientᵀ · rows to a sum, or begins it. In low precision a product rounds once a chunk, and the
    sum does not.
    """
    if total.dtype == rows.dtype:
        total.addmm_(gradient.t(), rows, beta=0 if first else 1)
        return
    # In pieces: a whole product in low precision would add half of the sum's bytes.
    for piece, columns in zip(total.split(PIECE), gradient.split(PIECE, dim=1), strict=True):
        product = columns.t() @ rows
        piece.copy_(product) if first else piece.add_(product)


def _scaled(own: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """own · factor, rounded once. In pieces: on a CPU a product in another dtype has a copy in its own."""
    if own.dtype == dtype:
        return own.mul_(factor)
    scaled = torch.empty_like(own, dtype=dtype)
    for piece, out in zip(own.split(PIECE), scaled.split(PIECE), strict=True):
        torch.mul(piece, factor, out=out)
    return scaled


PIECE = 16_384
"""Classes whose gradient is computed, or scaled, at once in low precision."""
