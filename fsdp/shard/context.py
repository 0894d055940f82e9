"""Rows of tokens divided over the ranks of the context axis (Ulysses).

Each of these ranks holds the same part of every row. Only attention needs the whole row: there the ranks
exchange, so that each has some heads of all positions, and exchange back. All else is computed for a token
alone, which is checked at the start: what mixes tokens beside attention would train without an error.

cut_rows        what a context rank gets of a micro-batch, on the host; labels are shifted before
apply_context   prepares a model before it is sharded; refuses those that attend otherwise
ContextRows     the rows of a micro-batch, whose attention exchanges
check_context   whether all but attention computes tokens one by one

A row that the axis does not divide ends with a document of padding, whose targets are masked.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fsdp.base.errors import ConfigError
from fsdp.distributed.mesh import MeshSizes
from fsdp.models.attention import Rows, differing_logits, read_rows, repeated, text_config
from fsdp.models.registry import IGNORED, POSITIONS, ROW_POSITIONS
from fsdp.models.transformer import Transformer

ALONE = "--mesh.context 1"
MOST_CHECKED = 4096
"""Tokens of a row that the check reads."""


def cut_rows(data: Mapping[str, Tensor], *, contexts: int, context: int, shifts: bool) -> dict[str, Tensor]:
    """`shifts`: whether labels are those of the token before, and become targets."""
    tokens, labels = data.get("inputs"), data.get("labels", data.get("targets"))
    others = sorted(data.keys() - {"inputs", "labels", "targets", POSITIONS})
    if tokens is None or labels is None or others or not labels.shape == tokens.shape == (*tokens.shape[:2],):
        fault = (
            f"the data have {', '.join(others)}" if others else "the data are no rows of tokens and targets"
        )
        raise ConfigError(f"--mesh.context {contexts} divides rows of tokens, and {fault}.", ALONE)
    if shifts and "labels" in data:
        labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    length = tokens.shape[1]
    spare = -length % contexts
    positions = data.get(POSITIONS, torch.arange(length).expand_as(tokens))
    padding = torch.arange(spare).expand(len(tokens), -1).to(positions.dtype)
    positions = torch.cat([positions, padding], 1)
    own = slice(context * (length + spare) // contexts, (context + 1) * (length + spare) // contexts)
    return {
        "inputs": F.pad(tokens, (0, spare))[:, own].contiguous(),
        "targets": F.pad(labels, (0, spare), value=IGNORED)[:, own].contiguous(),
        POSITIONS: positions[:, own].contiguous(),
        ROW_POSITIONS: positions,
    }


class ContextRows(Rows):
    """Knows the documents of whole rows, and attends to a part of their positions."""

    group: dist.ProcessGroup | None = None
    """None: tokens are those of whole rows, and nothing is exchanged."""
    mixes = True
    """Whether a token sees others; else attention returns its own value."""

    @torch.compiler.disable  # a compiled exchange may be moved before FSDP's gathers, on each rank otherwise
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, scale: float | None = None
    ) -> Tensor:
        if not self.mixes:
            return repeated(v, q.shape[1])
        if self.group is None:
            return super().attend(q, k, v, window=window, scale=scale)
        size = self.group.size()
        if k.shape[1] % size:  # fewer than ranks: each gets the one that its queries use
            k, v = repeated(k, size), repeated(v, size)
        q, k, v = _exchanged([q, k, v], 1, 2, self.group)
        y = super().attend(q, k, v, window=window, scale=scale)
        return _exchanged([y], 2, 1, self.group)[0]


class _Exchange(torch.autograd.Function):
    """A row to each rank, and one from each."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.group, arrived = group, torch.empty_like(sent, memory_format=torch.contiguous_format)
        dist.all_to_all_single(arrived, sent.contiguous(), group=group)
        return arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        arrived = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(arrived, gradient.contiguous(), group=ctx.group)
        return arrived, None


def _exchanged(parts: list[Tensor], given: int, received: int, group: dist.ProcessGroup) -> list[Tensor]:
    """Divides dim `given` over the ranks and joins what they send along dim `received`, in one exchange."""
    size = group.size()
    stacks = [torch.stack(part.chunk(size, given)) for part in parts]
    sent = torch.cat([stack.flatten(1) for stack in stacks], 1)
    arrived: Tensor = _Exchange.apply(sent, group)
    of_parts = arrived.split([stack[0].numel() for stack in stacks], 1)
    shaped = (one.view(stack.shape) for one, stack in zip(of_parts, stacks, strict=True))
    return [torch.cat([*one], received) for one in shaped]


def apply_context(model: Any, name: str, sizes: MeshSizes, computed: torch.dtype) -> None:
    """Gives the model's attention the rows that exchange; ConfigError for a model that cannot be divided."""
    asked, fault, heads = f"--mesh.context {sizes.context}", "", set[tuple[int, int]]()
    if isinstance(model, Transformer):
        rows: Any = ContextRows(computed, (model.sizes.head_dim,))
        model.register_forward_pre_hook(functools.partial(read_rows, rows, "rows"), with_kwargs=True)
        heads.add((model.sizes.heads, model.sizes.kv_heads))
    elif hasattr(model, "set_attn_implementation"):
        from fsdp.models.hf import attend_documents, maybe_entropy

        fault = attend_documents(model, computed, ContextRows)
        if POSITIONS not in inspect.signature(model.forward).parameters:
            fault = f"its forward has no parameter {POSITIONS}"
        elif maybe_entropy(model) is None:
            fault = "its loss is no cross entropy of each token"
        elif getattr(text_config(model), "output_router_logits", False):
            fault = "its router's loss is of whole rows (output_router_logits)"
        rows = getattr(model, "document_rows", None)
        heads = getattr(rows, "heads", heads)
    else:
        fault = "it is neither the built-in transformer nor a model of transformers"
    if fault:
        raise ConfigError(f"{asked} cannot divide rows of --model.name {name}: {fault}.", ALONE)
    for queries, keys in ((q // sizes.tensor, k // sizes.tensor) for q, k in heads):
        if not _divides(sizes.context, queries, keys):
            fits = max(n for n in range(1, sizes.context) if _divides(n, queries, keys))
            raise ConfigError(
                f"{asked} does not divide the {queries} query heads of --model.name {name} beside {keys} of "
                "keys" + (f", on each of {sizes.tensor} tensor ranks." if sizes.tensor > 1 else "."),
                f"--mesh.context {fits}",
            )
    model.document_rows = rows


def bind(model: Any, group: dist.ProcessGroup) -> None:
    """The ranks that exchange, once there are groups."""
    model.document_rows.group = group


def _divides(contexts: int, queries: int, keys: int) -> bool:
    return queries % contexts == 0 and (keys % contexts == 0 or contexts % keys == 0)


@contextlib.contextmanager
def undivided(model: Any, *, mixes: bool = True) -> Iterator[None]:
    """Context in which the model takes whole rows."""
    rows = model.document_rows
    kept = rows.group
    rows.group, rows.mixes = None, mixes
    try:
        yield
    finally:
        rows.group, rows.mixes = kept, True


def check_context(
    logits_of: Callable[[Tensor, Tensor], Tensor | None], tokens: Tensor, model: nn.Module, name: str
) -> None:
    """Checks that without attention the logits of either half of a row keep their bits when the tokens of the
    other change: what mixes tokens beside attention, as convolutions, state spaces and pooling do, would see
    a part of the row alone. Rounding could hide it: the convolutions of a random LFM2 do.
    """
    tokens = tokens[:, :MOST_CHECKED]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    half = tokens.shape[1] // 2
    with undivided(model, mixes=False):
        for kept in (slice(half, None), slice(half)):
            if difference := differing_logits(logits_of, tokens, positions, kept, model):
                raise ConfigError(
                    f"--mesh.context cannot divide rows of --model.name {name}: it mixes tokens beside "
                    f"attention; without it logits of one half change by {difference:.3g} with the other's "
                    "tokens.",
                    ALONE,
                )
