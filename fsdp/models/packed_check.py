"""Checks that a model keeps the documents of packed rows apart: by its arguments, then by its output.

A model may take position_ids while its attention crosses documents, as transformers' OPT, Falcon and XGLM
do; it trains without an error. Not here: the attention of the built-in model (packed_attention.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.models.packed_attention import POSITIONS

PACKED = "packed"
"""The fact of data whose samples hold several documents, with position_ids."""
HINT = "--data.args.rows document"


def check_positions(model: nn.Module, name: str, facts: Mapping[str, Any]) -> None:
    """Checks that the forward of a model takes position_ids, if the data have them."""
    if facts.get(PACKED) and POSITIONS not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f"--model.name {name}: the forward of {type(model).__name__} has no parameter {POSITIONS}, "
            "without which attention crosses the documents of packed rows.",
            HINT,
        )


def check_chunks(model: nn.Module, name: str, length: int) -> None:
    """Refuses attention in chunks by a token's place in its row, as Llama 4's: they cut documents."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    chunk = getattr(text, "attention_chunk_size", None)
    if chunk and chunk < length:
        raise ConfigError(
            f"--model.name {name} attends in chunks of {chunk} tokens of a row (attention_chunk_size), which "
            f"would cut the documents of packed rows of {length}.",
            f"--data.args.rows document, or --data.seq_len {chunk}",
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
    one, other = logits_of(tokens, positions), logits_of(changed, positions)
    if one is None or other is None or one.dim() < 3:
        return
    bound = 16 * torch.finfo(one.dtype).eps * float(one.abs().max()) if _has_experts(model) else 0.0
    apart = float((one[:, half:].double() - other[:, half:].double()).abs().max())
    if not apart <= bound:
        raise ConfigError(
            f"--model.name {name} takes {POSITIONS}, but its attention crosses the documents of packed rows: "
            f"logits of one document change by {apart:.3g} with the tokens of another.",
            HINT,
        )


def _has_experts(model: nn.Module) -> bool:
    """By the names of modules: the field of a configuration differs from model to model."""
    return any("expert" in name.lower() for name, _ in model.named_modules())
