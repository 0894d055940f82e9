"""Checks of a model: parameters that FSDP can shard, indices in its embeddings, a scalar loss, packed rows.

torch's own traceback names none of these. A model may take position_ids while its attention crosses the
documents of packed rows, as transformers' OPT, Falcon and XGLM do: it trains without an error. Not here: how
the loss is weighted (loss.py), attention within documents (packed.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fsdp.base.errors import ConfigError
from fsdp.base.torch_private.core import gradient_hooks, tree_leaves
from fsdp.models.hf_settings import text_config
from fsdp.models.packed import POSITIONS

IGNORED = -100
PACKED = "packed"
"""The fact of data whose samples hold several documents, with position_ids."""
WHOLE_ROWS = "--data.args.rows document"
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module, such as its dictionaries of parameters and buffers."""


def check_model(model: nn.Module, name: str, facts: Mapping[str, Any]) -> None:
    """Checks of a model on meta that a person has named, with this data."""
    check_parameters(model, f"--model.name {name}")
    check_vocabulary(model, name, facts)
    check_positions(model, name, facts)


def check_parameters(model: nn.Module, whose: str) -> None:
    """Checks, before sharding, that shapes are known, and that FSDP can shard and reduce what is stored.

    Messages begin with `whose`.
    """
    for fault, hint in (*_embedding_faults(model), *_parameter_faults(model)):
        raise ConfigError(f"{whose}: {fault}.", hint)


def _embedding_faults(model: nn.Module) -> Iterator[tuple[str, str]]:
    """What an embedding does beside a lookup: sparse gradients, and weights that forward scales."""
    for key, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        name = key or type(module).__name__
        if module.sparse:
            yield f"{name} has sparse gradients, which are neither reduced nor clipped", "sparse=False"
        if module.max_norm is not None:
            yield (
                f"{name} has max_norm {module.max_norm:g}: its forward writes into the rows that a rank "
                "looks up, which no shard and no other rank receives",
                "max_norm=None, and scale the rows after the lookup",
            )


def _parameter_faults(model: nn.Module) -> Iterator[tuple[str, str]]:
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            yield (
                f"{key} has no shape before the first forward, but sharding comes before it",
                "nn.Linear(IN, OUT) in place of nn.LazyLinear(OUT), and likewise for every lazy module",
            )
    for key, parameter in model.named_parameters():
        kind = type(parameter)
        if parameter.is_complex():
            yield (
                f"parameter {key} is {parameter.dtype}, which FSDP does not reduce",
                "nn.Parameter(torch.view_as_real(VALUES)), and torch.view_as_complex(parameter) in forward",
            )
        if gradient_hooks(parameter):
            yield (
                f"parameter {key} has a gradient hook, which sharding would lose: it replaces the parameters",
                "change the gradient in forward, as weight = SCALE.apply(self.weight) with a "
                "torch.autograd.Function, or between backward and update() of a loop of your own: "
                "docs/library.md",
            )
        # A tensor of another library (torchao's NF4Tensor) with operations of its own.
        dispatches = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
        if dispatches and not kind.__module__.startswith("torch."):
            yield (
                f"parameter {key} is of type {kind.__name__}, whose packed values cannot be cut into the "
                "shards of any number of ranks",
                f"{key} as it was before quantization; --precision.frozen bf16 stores what is not trained in "
                "half the bytes",
            )


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def kept_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that modules keep as plain attributes, or in lists and dictionaries: they are not moved or
    saved.
    """
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, (Tensor, list, tuple, dict)) and key not in _OF_MODULES:
                tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
                yield from ((f"{name + '.' if name else ''}{key}", leaf) for leaf in tensors)


def stale_reference(name: str) -> ConfigError:
    return ConfigError(
        f"{name} keeps parameters as they were before sharding, which replaces them.",
        "nn.ParameterList or nn.ParameterDict in its place, or look them up in forward: self.layer.weight",
    )


def batch_norms(model: nn.Module) -> list[str]:
    """The names of modules whose result depends on how a global batch is split over ranks and micro-batches.
    transformers and timm have classes of their own with BatchNorm as a base.
    """
    return [name for name, module in model.named_modules() if isinstance(module, BATCH_NORMS)]


def extra_states(model: nn.Module) -> list[str]:
    """The names of modules with a state beside parameters and buffers, which no checkpoint restores."""
    plain = nn.Module.get_extra_state
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if type(module).get_extra_state is not plain
    ]


def check_vocabulary(model: nn.Module, name: str, facts: Mapping[str, Any]) -> None:
    """Checks that a model of transformers has an embedding for each token of the data."""
    find = getattr(model, "get_input_embeddings", None)
    if "vocab_size" not in facts or not callable(find):
        return
    tokens = facts["vocab_size"]
    rows = getattr(find(), "num_embeddings", tokens)
    if rows < tokens:
        data = f"--data.tokenizer {facts['tokenizer']}" if "tokenizer" in facts else "the data"
        raise ConfigError(
            f"--model.name {name} has embeddings for {rows} tokens, but {data} has {tokens}.",
            f"the model's own tokenizer, or vocab_size={tokens} in the model's configuration",
        )


def make_contiguous(model: nn.Module) -> None:
    """Makes parameters contiguous, as FSDP needs them; values and names stay the same."""
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def misfit(error: Exception, model: nn.Module) -> ConfigError | None:
    """Returns a ConfigError if a forward or its loss failed because of indices out of range or targets that
    are not classes; None for other errors. It concerns one rank: others have other samples.
    """
    losses = (torch.nn.functional.cross_entropy.__code__, torch.nn.functional.nll_loss.__code__)
    for frame in frames(error):
        owner, values = frame.f_locals.get("self"), frame.f_locals.get("input")
        if isinstance(owner, nn.Embedding) and isinstance(values, Tensor):
            name = next((name for name, module in model.named_modules() if module is owner), "an embedding")
            what, indices, rows = f"{name} of the model is read", values, owner.num_embeddings
            hint = "ids from 0; more rows there, or fewer tokens in the data (--data.seq_len)"
        elif frame.f_code in losses:
            what, indices, rows = "a target is", frame.f_locals["target"], frame.f_locals["input"].shape[-1]
            hint = f"whole targets from 0, or {IGNORED}; a model with more classes, or its own loss"
        else:
            continue
        counted = indices[indices != IGNORED]
        if indices.is_floating_point():
            return ConfigError(f"{what} {indices.dtype}, not the index of a class.", hint, scope="rank")
        wrong = counted[(counted < 0) | (counted >= rows)]
        if wrong.numel():
            return ConfigError(f"{what} at {int(wrong[0])}, beyond 0 to {rows - 1}.", hint, scope="rank")
    return None


def check_one_number(loss: Tensor) -> None:
    """Raises ConfigError if the loss of a micro-batch is not a scalar."""
    if loss.dim():
        raise ConfigError(
            f"the model's own loss has the shape {tuple(loss.shape)}, not that of one number.",
            "return loss.mean()",
        )


def check_has_gradient(loss: Tensor) -> None:
    """Raises ConfigError if a micro-batch's loss has no gradient. It may be one rank's alone."""
    if not loss.requires_grad:
        raise ConfigError(
            "the loss does not depend on a trained parameter, so that it has no gradient.",
            "compute it without .detach(), .item() and torch.no_grad(), from parameters that are not frozen",
            scope="rank",
        )


# ---------------------------------------------------------------- packed rows


def check_positions(model: nn.Module, name: str, facts: Mapping[str, Any]) -> None:
    """Checks that the forward of a model takes position_ids, if the data have them."""
    if facts.get(PACKED) and POSITIONS not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f"--model.name {name}: the forward of {type(model).__name__} has no parameter {POSITIONS}, "
            "without which attention crosses the documents of packed rows.",
            WHOLE_ROWS,
        )


def check_chunks(model: nn.Module, name: str, length: int) -> None:
    """Refuses attention in chunks by a token's place in its row, as Llama 4's: they cut documents."""
    chunk = getattr(text_config(model), "attention_chunk_size", None)
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
    # By the names of modules: the field of a configuration differs from model to model.
    experts = any("expert" in name.lower() for name, _ in model.named_modules())
    bound = 16 * torch.finfo(one.dtype).eps * float(one.abs().max()) if experts else 0.0
    apart = float((one[:, half:].double() - other[:, half:].double()).abs().max())
    if not apart <= bound:
        raise ConfigError(
            f"--model.name {name} takes {POSITIONS}, but its attention crosses the documents of packed rows: "
            f"logits of one document change by {apart:.3g} with the tokens of another.",
            WHOLE_ROWS,
        )


# ---------------------------------------------------------------- where it failed


def frames(error: Exception) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
