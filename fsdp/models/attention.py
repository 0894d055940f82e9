"""Attention within each document of a packed row, and checks of models that get packed rows.

A row's `position_ids` start again where a document does: the form in which transformers reads packed rows.
`Rows` reads them once a micro-batch; `attend` is the core that all layers call, of the built-in transformer
and of models of transformers (fsdp/models/hf.py). On CUDA in half precision torch.nn.attention.varlen gets
the documents one by one; elsewhere a mask of [length, length] blocks other documents. A model may take
position_ids while its attention crosses the documents, as transformers' Falcon and XGLM do: it trains without
an error, and is checked by its output. Not here: how rows are packed (fsdp/data/documents.py).
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.base.torch_private import StandIns
from fsdp.models.registry import POSITIONS, ROW_POSITIONS, WHOLE_ROWS

VARLEN_DTYPES = (torch.float16, torch.bfloat16)
VARLEN_HEAD_DIM = 256
KNOWN = (POSITIONS, "use_cache", "is_causal", "scaling", "sliding_window")
"""Keywords of transformers' attention functions that `attend` follows, or that change nothing."""


class Rows:
    """The documents in the rows of a micro-batch, for all layers: bounds for varlen, or a mask for each
    window.

    Read before the first layer: recomputation would not repeat what the first layer alone makes. Not a tuple
    or dataclass: FSDP's mixed precision casts the tensors in those.
    """

    bounds: Tensor | None
    masks: dict[int | None, Tensor]
    heads: set[tuple[int, int]]
    """Of queries and of keys, in the layers of a model of transformers."""

    def __init__(
        self, dtype: torch.dtype, head_dims: Collection[int], windows: Collection[int | None] = (None,)
    ) -> None:
        """What the layers compute in: the dtype of q, its sizes of heads, and their windows."""
        self._dtype, self._head_dims, self._windows = dtype, head_dims, windows

    def read(self, position_ids: Tensor) -> Rows:
        starts, dtype = document_starts(position_ids), self._dtype
        self.bounds, self.masks = None, {}
        if all(uses_varlen(starts.device, dtype, size) for size in self._head_dims):
            self.bounds = document_bounds(starts)
            return self
        length = starts.shape[1]
        self.masks = {window: document_mask(starts, dtype, window or length) for window in self._windows}
        return self

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, scale: float | None = None
    ) -> Tensor:
        return attend(q, k, v, self, window=window, scale=scale)


def read_rows(rows: Rows, passed_as: str, model: nn.Module, args: Any, more: dict[str, Any]) -> Any:
    """A hook before a model's forward. `passed_as` is the parameter that takes the rows; empty for none."""
    whole = more.pop(ROW_POSITIONS, None)
    positions = more.get(POSITIONS) if whole is None else whole
    if positions is None:  # each row is one document
        tokens = args[0] if args else more["input_ids"]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    rows.read(positions)
    return args, more | ({passed_as: rows} if passed_as else {})


def attend(
    q: Tensor, k: Tensor, v: Tensor, rows: Rows, *, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Causal attention of q, k, v [batch, heads, length, head_dim], within documents. A token sees itself and
    the `window` - 1 before it.
    """
    if rows.bounds is not None:
        return _varlen(q, k, v, rows.bounds, window, scale)
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.device.type == "cuda":  # with a mask no fused kernel takes groups there
        k, v, grouped = repeated(k, q.shape[1]), repeated(v, q.shape[1]), False
    mask = rows.masks[window].to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def document_starts(position_ids: Tensor) -> Tensor:
    """Marks the first token of each document: its position does not follow the one before."""
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return starts


def document_mask(starts: Tensor, dtype: torch.dtype, window: int) -> Tensor:
    """[batch, 1, length, length]: 0 for the same document up to the token itself, -inf elsewhere. In the
    dtype of the computation: of another one, every block would save its own converted copy.
    """
    document = starts.cumsum(-1)
    same = document[:, None, :, None] == document[:, None, None, :]
    blocked = ~same.tril().triu(1 - window)
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


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, window: int | None, scale: float | None
) -> Tensor:
    kernel = varlen_kernel()
    assert kernel is not None
    settings: dict[str, Any] = {"window_size": (window - 1 if window else -1, 0), "scale": scale}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in inspect.signature(kernel).parameters:
            settings["enable_gqa"] = True
        else:
            k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    width = v.shape[-1]
    if width != q.shape[-1]:  # the kernel takes one size of heads
        v = F.pad(v, (0, q.shape[-1] - width))
    flat = [heads.transpose(1, 2).flatten(0, 1) for heads in (q, k, v)]
    # The row's length bounds that of a document; the greatest one would be read from the device, and compiled
    # code would be compiled anew for each.
    batch, _, length, _ = q.shape
    y: Tensor = kernel(*flat, bounds, bounds, length, length, **settings)
    return y[..., :width].unflatten(0, (batch, length)).transpose(1, 2)


def repeated(heads: Tensor, count: int) -> Tensor:
    """k or v with as many heads as q."""
    return heads.repeat_interleave(count // heads.shape[1], dim=1)


# ---------------------------------------------------------------- in models of transformers


def attend_rows(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **more: Any
) -> tuple[Tensor, None]:
    """`attend` in the form of transformers' attention functions."""
    window, scale = more.get("sliding_window"), more.get("scaling")
    y = module.document_rows.attend(query, key, value, window=window, scale=scale)
    return y.transpose(1, 2).contiguous(), None


class AttentionReader(StandIns):
    """Stands for the attention and the masks of a model of transformers in forwards on the meta device.

    A comparison of tensors has no result there. That it is not `packed` makes transformers find one document
    in a row, or several.
    """

    packed = False
    fault = ""
    """Of the first call that `attend` would compute otherwise than transformers' sdpa with its mask."""

    def __init__(self, model: nn.Module, shape: torch.Size) -> None:
        """`shape` is that of the tokens, [batch, length]."""
        super().__init__()
        self._names, self._shape = {module: name for name, module in model.named_modules()}, shape
        self.layers: dict[str, tuple[torch.dtype, int, int | None, tuple[int, int]]] = {}
        """The dtype and head_dim of a layer's q, its window, its heads of queries and of keys."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__ and args[0].is_meta:
            return not self.packed
        return super().__torch_function__(func, types, args, kwargs)

    def mask(self, **more: Any) -> Tensor:
        """A causal mask, of documents in packed rows, has the attribute `window`; others do not have it."""
        batch, length = self._shape
        mask: Any = torch.empty(batch, 1, length, length, dtype=torch.bool, device="meta")
        skipped = more.get("allow_is_causal_skip", self.packed) is not self.packed
        if skipped and more.get("attention_mask") is None:
            mask.window = more.get("local_size")
        return mask  # type: ignore[no-any-return]

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any
    ) -> tuple[Tensor, None]:
        batch, heads, length, size = query.shape
        window, causal = more.get("sliding_window"), more.get("is_causal")
        passed = [name for name, x in more.items() if name not in KNOWN and (isinstance(x, Tensor) or x)]
        if passed:
            self.fault = self.fault or f"it has {', '.join(passed)}"
        elif (
            not (getattr(module, "is_causal", True) if causal is None else causal)
            or getattr(attention_mask, "window", 0) != window
            or not (batch, length) == self._shape == (key.shape[0], key.shape[2])
            or key.shape[1] != value.shape[1]
            or value.shape[3] > size
        ):
            self.fault = self.fault or "its mask or shapes are not those of a document's tokens so far"
        self.layers[self._names[module]] = query.dtype, size, window, (heads, key.shape[1])
        return query.new_empty(batch, length, heads, value.shape[3]), None


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


def differing_logits(
    logits_of: Callable[[Tensor, Tensor], Tensor | None],
    tokens: Tensor,
    positions: Tensor,
    kept: slice,
    model: nn.Module,
) -> float:
    """How far the logits of the `kept` tokens change with all the others; 0 for the same bits. A mixture of
    experts may compute them in another order: it has a bound.
    """
    changed = torch.where(tokens > 0, tokens - 1, 1)
    changed[:, kept] = tokens[:, kept]
    before, after = logits_of(tokens, positions), logits_of(changed, positions)
    if before is None or after is None or before.dim() < 3:
        return 0.0
    # By the names of modules: the field of a configuration differs from model to model.
    experts = any("expert" in name.lower() for name, _ in model.named_modules())
    bound = 16 * torch.finfo(before.dtype).eps * float(before.abs().max()) if experts else 0.0
    difference = float((before[:, kept].double() - after[:, kept].double()).abs().max())
    return 0.0 if difference <= bound else difference


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
    if difference := differing_logits(logits_of, tokens, positions, slice(half, None), model):
        raise ConfigError(
            f"--model.name {name} takes {POSITIONS}, but its attention crosses the documents of packed rows: "
            f"logits of one document change by {difference:.3g} with the tokens of another.",
            WHOLE_ROWS,
        )
