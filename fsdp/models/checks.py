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
    _check_embeddings(model, whose)
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ConfigError(
                f"{whose}: {key} has no shape before the first forward, but sharding comes before it.",
                "nn.Linear(IN, OUT) in place of nn.LazyLinear(OUT), and likewise for every lazy module",
            )
    for key, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ConfigError(
                f"{whose}: parameter {key} is {str(parameter.dtype).removeprefix('torch.')}, "
                "which FSDP does not reduce.",
                "nn.Parameter(torch.view_as_real(VALUES)), and torch.view_as_complex(parameter) in forward",
            )
        if gradient_hooks(parameter):
            raise ConfigError(
                f"{whose}: parameter {key} has a gradient hook, which sharding would lose: it replaces the "
                "parameters.",
                "change the gradient in forward, as weight = SCALE.apply(self.weight) with a "
                "torch.autograd.Function, or between backward and update() of a loop of your own: "
                "docs/library.md",
            )
        if _is_packed(parameter):
            raise ConfigError(
                f"{whose}: parameter {key} is of type {type(parameter).__name__}, whose packed "
                "values cannot be cut into the shards of any number of ranks.",
                f"{key} as it was before quantization; --precision.frozen bf16 stores what is not trained in "
                "half the bytes",
            )


def _check_embeddings(model: nn.Module, whose: str) -> None:
    """Refuses what an embedding does beside a lookup: sparse gradients, and weights that forward scales."""
    for key, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        name = f"{whose}: {key or type(module).__name__}"
        if module.sparse:
            raise ConfigError(
                f"{name} has sparse gradients, which are neither reduced nor clipped.", "sparse=False"
            )
        if module.max_norm is not None:
            raise ConfigError(
                f"{name} has max_norm {module.max_norm:g}: its forward writes into the rows that a rank "
                "looks up, which no shard and no other rank receives.",
                "max_norm=None, and scale the rows after the lookup",
            )


def _is_packed(parameter: nn.Parameter) -> bool:
    """Whether it is a tensor of another library (torchao's NF4Tensor) with operations of its own."""
    kind = type(parameter)
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not kind.__module__.startswith(
        "torch."
    )


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def kept_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that modules keep as plain attributes, or in lists and dictionaries: they are not moved or
    saved.
    """
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, (Tensor, list, tuple, dict)) and key not in _OF_MODULES:
                found = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
                yield from ((f"{name + '.' if name else ''}{key}", leaf) for leaf in found)


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


def lacks_base(model: nn.Module) -> str | None:
    """Returns the first orthogonal parametrization without a base: torch omits it on the meta device."""
    return next(
        (
            f"{name}.base"
            for name, module in model.named_modules()
            if type(module).__module__ == "torch.nn.utils.parametrizations"
            and getattr(module, "base", module) is None
        ),
        None,
    )


def misfit(error: Exception, model: nn.Module) -> ConfigError | None:
    """Returns a ConfigError if a forward or its loss failed because of indices out of range or targets that
    are not classes; None for other errors. It concerns one rank: others have other samples.
    """
    found = next(_embeddings(error), None)
    targets, logits = _cross_entropy(error)
    if found is not None:
        said = _beyond(*found, model)
    elif targets is not None and logits is not None:
        said = _no_classes(targets, logits)
    else:
        return None
    if said is not None:
        said.scope = "rank"
    return said


def _beyond(embedding: nn.Embedding, ids: Tensor, model: nn.Module) -> ConfigError | None:
    low, high, size = int(ids.min()), int(ids.max()), embedding.num_embeddings
    if low >= 0 and high < size:
        return None
    name = next((name for name, module in model.named_modules() if module is embedding), "an embedding")
    return ConfigError(
        f"{name} of the model is read at {high if high >= size else low}, but has rows 0 to {size - 1}: "
        "a token id or a position of the data is out of range.",
        f"give the model {high + 1} rows there, or the data fewer tokens (--data.seq_len)"
        if high >= size
        else "ids are at least 0",
    )


def _no_classes(targets: Tensor, logits: Tensor) -> ConfigError | None:
    if targets.is_floating_point() or targets.is_complex():
        return ConfigError(
            f"targets are {str(targets.dtype).removeprefix('torch.')}, but cross entropy needs class "
            "indices.",
            "return targets.long() from the data, or let the model take targets and return its loss",
        )
    classes, counted = logits.shape[-1], targets[targets != IGNORED]
    if not counted.numel() or (int(counted.min()) >= 0 and int(counted.max()) < classes):
        return None
    wrong = int(counted.max()) if int(counted.max()) >= classes else int(counted.min())
    return ConfigError(
        f"a target is {wrong}, but the model has logits for classes 0 to {classes - 1} "
        f"({IGNORED} masks a target).",
        f"a model with {wrong + 1} classes" if wrong >= classes else f"targets from 0, or {IGNORED}",
    )


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
    bound = 16 * torch.finfo(one.dtype).eps * float(one.abs().max()) if _has_experts(model) else 0.0
    apart = float((one[:, half:].double() - other[:, half:].double()).abs().max())
    if not apart <= bound:
        raise ConfigError(
            f"--model.name {name} takes {POSITIONS}, but its attention crosses the documents of packed rows: "
            f"logits of one document change by {apart:.3g} with the tokens of another.",
            WHOLE_ROWS,
        )


def _has_experts(model: nn.Module) -> bool:
    """By the names of modules: the field of a configuration differs from model to model."""
    return any("expert" in name.lower() for name, _ in model.named_modules())


# ---------------------------------------------------------------- where it failed


def frames(error: Exception) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _embeddings(error: Exception) -> Iterator[tuple[nn.Embedding, Tensor]]:
    for frame in frames(error):
        owner, ids = frame.f_locals.get("self"), frame.f_locals.get("input")
        if isinstance(owner, nn.Embedding) and isinstance(ids, Tensor):
            yield owner, ids


def _cross_entropy(error: Exception) -> tuple[Tensor | None, Tensor | None]:
    """Returns targets and logits of torch's cross_entropy or nll_loss, if it was the function that failed."""
    functions = (torch.nn.functional.cross_entropy.__code__, torch.nn.functional.nll_loss.__code__)
    for frame in frames(error):
        if frame.f_code in functions:
            inside: Mapping[str, Any] = frame.f_locals
            return inside["target"], inside["input"]
    return None, None
