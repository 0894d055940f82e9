"""Attention within each document of a packed row.

A row's `position_ids` start again where a document does: the form in which transformers reads packed rows.
On CUDA in half precision torch.nn.attention.varlen gets the documents one by one; elsewhere a mask of
[length, length] blocks other documents. Not here: how rows are packed (fsdp/data/packing.py), or the check
of a model by its output (checks.py).
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

POSITIONS = "position_ids"
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
    if device.type != "cuda" or dtype not in VARLEN_DTYPES or varlen_kernel() is None:
        return False
    if not torch.backends.cuda.flash_sdp_enabled():
        return False
    if head_dim % 8 or head_dim > VARLEN_HEAD_DIM:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


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
