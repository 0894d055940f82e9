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
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fsdp.base.devices import as_bits
from fsdp.base.errors import ConfigError
from fsdp.distributed.collectives import all_gather_objects
from fsdp.distributed.mesh import MeshSizes
from fsdp.models.attention import Rows, read_rows, repeated, text_config
from fsdp.models.registry import IGNORED, POSITIONS, ROW_POSITIONS
from fsdp.models.transformer import Transformer
from fsdp.models.units import batch_norms, clean_name

ALONE = "--mesh.context 1"
MOST_CHECKED = 4096
"""Tokens of a row that the check reads."""
ROUNDED = {torch.float32: 1e-3, torch.float64: 1e-5}
"""Of the largest logit: how far rounding may change one with the number of tokens, 0.1 in half precision. In
float64 too transformers computes norms and positions in float32.
"""
LogitsOf = Callable[..., Tensor | None]
"""Of tokens, their positions, and further arguments of the model."""


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


class Exchange(torch.autograd.Function):
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
    arrived: Tensor = Exchange.apply(sent, group)
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
        if norms := batch_norms(model):
            fault = f"{norms[0]} is BatchNorm, over the tokens that a rank has"
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


def check_context(logits_of: LogitsOf, tokens: Tensor, model: Any, name: str) -> None:
    """Checks that tokens meet in attention alone, then logits of parts of rows against those of whole rows.
    Collective.
    """
    group = model.document_rows.group
    own = {"contexts": group.size(), "context": dist.get_rank(group), "shifts": False}
    tokens = tokens[:, : min(tokens.shape[1], MOST_CHECKED) // group.size() * group.size()]
    if not tokens.numel():
        return
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    row = tokens.cpu()
    part = {
        key: value.to(tokens.device)
        for key, value in cut_rows({"inputs": row, "targets": row}, **own).items()
    }
    with torch.compiler.set_stance("force_eager"):  # hooks would be compiled in
        with undivided(model, mixes=False):
            mixing = _mixing_module(lambda changed: logits_of(changed, positions), tokens, model)
        with undivided(model):
            whole = logits_of(tokens, positions)
        divided = logits_of(part["inputs"], part[POSITIONS], **{ROW_POSITIONS: part[ROW_POSITIONS]})
    fault = "" if mixing is None else f"{mixing or 'its forward'} mixes tokens beside attention"
    if not fault and whole is not None and divided is not None:
        expected = whole.chunk(group.size(), 1)[own["context"]].double()
        difference, most = float((expected - divided.double()).abs().max()), float(expected.abs().max())
        if not difference <= ROUNDED.get(whole.dtype, 0.1) * most:
            fault = f"logits of a part of a row differ by {difference:.3g} from those of the whole row"
    if fault := next(filter(None, all_gather_objects(fault)), ""):
        raise ConfigError(f"--mesh.context cannot divide rows of --model.name {name}: {fault}.", ALONE)


def _mixing_module(
    logits_of: Callable[[Tensor], Tensor | None], tokens: Tensor, model: nn.Module
) -> str | None:
    """The first module whose output for one half of a row changes with the other half although what it
    receives for it does not; None without one.

    Compared by bits, since rounding could hide it, as that of a random LFM2 does. A mixture of experts, which
    multiplies tokens in an order of its own, returns what it receives.
    """
    half = tokens.shape[1] // 2
    names = {clean_name(key): module for key, module in model.named_modules()}
    mixtures = {re.split(r"\.?[^.]*expert", key, maxsplit=1)[0] for key in names if ".expert" in key}
    runs: list[list[tuple[str, Tensor, Tensor]]] = []

    def digest(x: Any, kept: slice) -> Tensor:
        return as_bits(tokens[:0] if x is None else x[:, kept]).sum(dtype=torch.int64)

    def rows_in(values: Iterable[Any]) -> Tensor | None:
        return next((x for x in values if isinstance(x, Tensor) and x.shape[:2] == tokens.shape), None)

    for kept in (slice(half, None), slice(half)):
        changed = torch.where(tokens > 0, tokens - 1, 1)
        changed[:, kept] = tokens[:, kept]
        runs.clear()

        def note(key: str, kept: slice, module: nn.Module, args: Any, more: Any, output: Any) -> Any:
            received, several = rows_in([*args, *more.values()]), isinstance(output, tuple)
            if key in mixtures:
                return (received, *output[1:]) if several else received
            made = rows_in(output if several else [output])
            runs[-1].append((key, digest(received, kept), digest(made, kept)))
            return None

        hooks = [
            module.register_forward_hook(functools.partial(note, key, kept), with_kwargs=True)
            for key, module in names.items()
            if not key.startswith(tuple(f"{mixture}." for mixture in mixtures))
        ]
        try:
            for given in (tokens, changed):
                runs.append([])
                runs[-1].append(("", digest(None, kept), digest(logits_of(given), kept)))
        finally:
            for hook in hooks:
                hook.remove()
        for (key, received, made), (_, *again) in zip(*runs, strict=True):
            if int(made) != int(again[1]) and int(received) == int(again[0]):
                return key
    return None
