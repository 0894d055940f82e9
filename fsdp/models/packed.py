"""Attention within each document of a packed row, and checks of models that get packed rows.

A row's `position_ids` start again where a document does: the form in which transformers reads packed rows.
On CUDA in half precision torch.nn.attention.varlen gets the documents one by one; elsewhere a mask of
[length, length] blocks other documents. A model may take position_ids while its attention crosses the
documents, as transformers' OPT, Falcon and XGLM do: it trains without an error, and is checked by its output.
Not here: how rows are packed (fsdp/data/documents.py).
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.models.registry import POSITIONS, WHOLE_ROWS

VARLEN_DTYPES = (torch.float16, torch.bfloat16)
VARLEN_HEAD_DIM = 256


class Documents:
    """Where the documents of one micro-batch begin, for all blocks: a mask, or bounds for varlen.

    Made before the first block: recomputation would not repeat what the first block alone makes. Not a tuple
    or dataclass: FSDP's mixed precision casts the tensors in those.
    """

    def __init__(self, *, mask: Tensor | None = None, bounds: Tensor | None = None) -> None:
        self.mask, self.bounds = mask, bounds

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of q, k, v [batch, heads, length, head_dim], within documents."""
        if self.bounds is not None:
            return _varlen(q, k, v, self.bounds)
        assert self.mask is not None
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask.to(q.dtype), enable_gqa=gqa)


def documents_of(position_ids: Tensor, x: Tensor, head_dim: int) -> Documents:
    """Chooses between varlen and a mask by the device and dtype of the blocks' input x."""
    starts = document_starts(position_ids)
    if uses_varlen(x.device, x.dtype, head_dim):
        return Documents(bounds=document_bounds(starts))
    return Documents(mask=document_mask(starts, x.dtype))


def document_starts(position_ids: Tensor) -> Tensor:
    """Marks the first token of each document: its position does not follow the one before."""
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return starts


def document_mask(starts: Tensor, dtype: torch.dtype) -> Tensor:
    """[batch, 1, length, length]: 0 for the same document up to the token itself, -inf elsewhere. In the
    dtype of the computation: of another one, every block would save its own converted copy.
    """
    document = starts.cumsum(-1)
    same = document[:, None, :, None] == document[:, None, None, :]
    blocked = ~same.tril()
    return torch.zeros(blocked.shape, dtype=dtype, device=starts.device).masked_fill_(blocked, -torch.inf)


def document_bounds(starts: Tensor) -> Tensor:
    """Returns the first place of each document, counted over all rows, and the end of the last. The host
    waits for the device, once a micro-batch: the number of documents is a shape.
    """
    flat = starts.flatten()
    return F.pad(flat.nonzero().flatten(), (0, 1), value=flat.numel()).to(torch.int32)


# ---------------------------------------------------------------- varlen


@functools.cache
def varlen_kernel() -> Callable[..., Any] | None:
    """torch's variable-length attention; None if this torch has none."""
    try:
        kernel: Callable[..., Any] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    return kernel


def uses_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Its kernel is FlashAttention: half precision, compute capability 8.0, head_dim a multiple of 8.
    Not used where --speed.attention names another one.
    """
    return (
        device.type == "cuda"
        and fits_varlen(dtype, head_dim)
        and torch.backends.cuda.flash_sdp_enabled()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def fits_varlen(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel takes them, on a device that has it."""
    fits = dtype in VARLEN_DTYPES and head_dim % 8 == 0 and head_dim <= VARLEN_HEAD_DIM
    return fits and varlen_kernel() is not None


def _varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    kernel = varlen_kernel()
    assert kernel is not None
    known = inspect.signature(kernel).parameters
    settings: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in known:
            settings["enable_gqa"] = True
        else:
            k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1) for heads in (k, v))
    flat = [heads.transpose(1, 2).flatten(0, 1) for heads in (q, k, v)]
    # The row's length bounds that of a document; the greatest one would be read from the device, and compiled
    # code would be compiled anew for each.
    batch, _, length, _ = q.shape
    y: Tensor = kernel(*flat, bounds, bounds, length, length, **settings)
    return y.unflatten(0, (batch, length)).transpose(1, 2)


# ---------------------------------------------------------------- checks


def text_config(model: nn.Module) -> Any:
    """The configuration of a model, of several parts that of its decoder of text; None without one."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def check_chunks(model: nn.Module, name: str, length: int) -> None:
    """Refuses attention in chunks by a token's place in its row, as Llama 4's: they cut documents."""
    chunk = getattr(text_config(model), "attention_chunk_size", None)
    if chunk and chunk < length:
        raise ConfigError(
            f"--model.name {name} attends in chunks of {chunk} tokens of a row (attention_chunk_size), which "
            f"would cut the documents of packed rows of {length}.",
            f"{WHOLE_ROWS}, or --data.seq_len {chunk}",
        )


def check_documents_apart(
    logits_of: Callable[[Tensor, Tensor], Tensor | None], tokens: Tensor, model: nn.Module, name: str
) -> None:
    """Checks that the logits of a row's second document keep their bits when the tokens of the first
    change. A mixture of experts may compute them in another order: it has a bound.
    """
    length = tokens.shape[1]
    half = length // 2
    if not half:
        return
    positions = torch.cat([torch.arange(half), torch.arange(length - half)]).to(tokens.device)
    positions = positions.expand_as(tokens)
    changed = torch.where(tokens > 0, tokens - 1, 1)
    changed = torch.cat([changed[:, :half], tokens[:, half:]], dim=1)
    before, after = logits_of(tokens, positions), logits_of(changed, positions)
    if before is None or after is None or before.dim() < 3:
        return
    # By the names of modules: the field of a configuration differs from model to model.
    experts = any("expert" in name.lower() for name, _ in model.named_modules())
    bound = 16 * torch.finfo(before.dtype).eps * float(before.abs().max()) if experts else 0.0
    difference = float((before[:, half:].double() - after[:, half:].double()).abs().max())
    if not difference <= bound:
        raise ConfigError(
            f"--model.name {name} takes {POSITIONS}, but its attention crosses the documents of packed rows: "
            f"logits of one document change by {difference:.3g} with the tokens of another.",
            WHOLE_ROWS,
        )
