"""Makes a meta model real: every weight gets its value once, and a check proves it.

Three ways. If the model defines how each parameter is drawn, each rank draws its own shard from a
counter-based stream, without communication. Of a folder of transformers each rank reads the rows of its own
shard. Any other model is built on rank 0 and sent parameter by parameter, each rank receiving its rows alone.
Initial weights are a function of the seed: the same bits at any number of ranks, under any strategy.

Memory is poisoned before it is filled, so that uninitialised values are found by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp.base.devices import same_values
from fsdp.base.errors import ConfigError, ShardrunError
from fsdp.distributed.boxes import box_of, local_tensor, shard_count
from fsdp.distributed.collectives import all_gather_objects, on_main
from fsdp.models import ModelSpec, to_empty
from fsdp.models.init import Init, draw, draw_into, persistent, seeded
from fsdp.models.units import all_names
from fsdp.shard.checks import (
    check_initialised,
    fill_with_poison,
    poison,
)
from fsdp.shard.shard import Sharded

if TYPE_CHECKING:
    from fsdp.shard.nvme import NvmeFiles


Take = Callable[[str], "Tensor | None"]
"""Rank 0's side of a broadcast: full tensors by name, each taken once, in the model's order."""


class RowSource(Protocol):
    """Weights that each rank reads by itself, by rows of dim 0; a scalar is one row."""

    def rows(self, name: str, first: int, last: int) -> Tensor: ...


def _adapter_inits(root: nn.Module) -> Mapping[str, Init]:
    if not any(name.endswith("lora_a") for name, _ in root.named_parameters()):
        return {}
    from fsdp.models.lora import lora_inits

    return lora_inits(root)


def materialize(
    sharded: Sharded,
    *,
    spec: ModelSpec,
    seed: int,
    init: str,
    rank: int,
    weights: Callable[[], Mapping[str, Tensor]] | None = None,
    pretrained: Callable[[], RowSource] | None = None,
    rest_device: torch.device | None = None,
    nvme_files: NvmeFiles | None = None,
    restored: bool = False,
) -> None:
    """Gives every parameter and buffer of a meta model its value, then checks it. Collective.

    `rest_device` holds the parameters between steps: the host, if they are offloaded; `nvme_files` may store
    them in files. `restored`: a checkpoint gives the values and checks them (fsdp/checkpoint/restore.py),
    which are not drawn only to be overwritten, which costs seconds a hundred million parameters.
    """
    root = sharded.root
    methods: Any = root
    inits: Mapping[str, Init] = methods.param_inits() if hasattr(root, "param_inits") else {}
    added = _adapter_inits(root)
    device = rest_device or sharded.device
    to_empty(root, device, None if nvme_files is None else functools.partial(nvme_files.empty, device=device))
    if nvme_files is not None:
        nvme_files.settle_weights()
    poison(root)
    if rest_device is not None:
        _buffers_to(root, sharded.device)
    if hasattr(root, "init_buffers"):
        methods.init_buffers(sharded.device)
    if restored and _in_checkpoint(root):
        check_initialised(root, restored=True)
        return
    # No weights contain adapters: each rank draws its own part, whatever the source of the others.
    _draw_shards(root, added, seed)
    if pretrained is not None:
        _read_shards(root, pretrained, added)
    elif inits and init == "shard" and weights is None:
        _draw_shards(root, inits, seed)
    else:
        _send_all(sharded, lambda: _source(spec, inits, seed, weights, root), added, rank)
    check_initialised(root)


def _in_checkpoint(root: nn.Module) -> bool:
    """Whether a checkpoint holds everything that the model does not fill by itself."""
    return hasattr(root, "init_buffers") or len(persistent(root)) == sum(
        1 for _ in (*root.parameters(), *root.buffers())
    )


# ---------------------------------------------------------------- filling


def _buffers_to(root: nn.Module, device: torch.device) -> None:
    """Parameters are stored on the host, buffers on the device that forward reads them from."""
    moved = {buffer: buffer.to(device) for buffer in root.buffers()}
    for module in root.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, moved[buffer])


@torch.no_grad()
def _draw_shards(root: nn.Module, inits: Mapping[str, Init], seed: int) -> None:
    for name, target in [*root.named_parameters(), *root.named_buffers()]:
        if name in inits:  # the check names one that is not
            part, box = local_tensor(target), box_of(target)
            if box.contiguous:
                draw_into(part, inits[name], seed, name, box.start)
            else:  # the rows are drawn whole
                rows = part.new_empty(box.sizes[0], *box.size[1:])
                start = box.offsets[0] * rows[0].numel() if len(rows) else 0
                part.copy_(draw_into(rows, inits[name], seed, name, start)[:, *box.slices[1:]])


def _read_shards(root: nn.Module, open_rows: Callable[[], RowSource], added: Mapping[str, Init]) -> None:
    """Each rank reads the rows of its shards. An error on one rank is raised on all. Collective."""
    failure: Exception | None = None
    try:
        _fill_rows(root, open_rows(), added)
    except (ShardrunError, OSError) as error:
        failure = error
    failures = [(at, one) for at, one in enumerate(all_gather_objects(failure)) if one is not None]
    if failures:
        at, first = failures[0]
        if isinstance(first, ShardrunError):
            raise first
        raise ConfigError(f"rank {at} cannot read the weights: {first}.", "give a folder that all nodes see")


@torch.no_grad()
def _fill_rows(root: nn.Module, source: RowSource, added: Mapping[str, Init]) -> None:
    saved = root.state_dict().keys()
    for name, target in [*root.named_parameters(), *root.named_buffers()]:
        if name not in saved or name in added:
            continue
        part, box = local_tensor(target), box_of(target)
        if box.numel:
            rows = box.slices[0] if box.slices else slice(0, 1)
            read = source.rows(name, rows.start, rows.stop)
            part.copy_(read if box.contiguous else read[:, *box.slices[1:]])


def _sent_buffers(root: nn.Module) -> list[tuple[str, Tensor]]:
    """All names; or, if the model fills its buffers itself, those that a state dict could hold."""
    if not hasattr(root, "init_buffers"):
        return list(root.named_buffers())
    persistent = root.state_dict().keys()
    return [(name, buffer) for name, buffer in root.named_buffers() if name in persistent]


def _source(
    spec: ModelSpec,
    inits: Mapping[str, Init],
    seed: int,
    weights: Callable[[], Mapping[str, Tensor]] | None,
    root: nn.Module,
) -> Take:
    """Rank 0's values. A model that defines its inits is never built whole, nor is one whose state dict
    is complete.
    """
    if weights is None and inits:
        shapes = {name: parameter.shape for name, parameter in root.named_parameters()}
        return lambda name: (
            draw(inits[name], seed, name, 0, shapes[name].numel()).view(shapes[name])
            if name in inits
            else None
        )
    draws = spec.draws(seed) if weights is None else None
    if draws is not None:
        return draws.get
    if weights is None:
        return _built(spec, seed)
    state, names = weights(), all_names(root)
    check_state_fits(state, names, root, "--model.weights")
    complete = hasattr(root, "init_buffers") or all(name in state for name, _ in root.named_buffers())
    rest = None if complete else _built(spec, seed)

    def take(name: str) -> Tensor | None:
        known = next((known for known in names.get(name, [name]) if known in state), None)
        return state[known] if known is not None else rest(name) if rest is not None else None

    return take


def _built(spec: ModelSpec, seed: int) -> Take:
    """Of a real copy of the model on the host, released parameter by parameter."""
    model = build_on_host(spec, seed)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return lambda name: tensors.pop(name).detach() if name in tensors else None


def check_state_fits(
    state: Mapping[str, Tensor], names: Mapping[str, list[str]], root: nn.Module, source: str
) -> None:
    """Checks that nothing is missing or unexpected and that every shape matches: else a part would be
    trained from scratch unnoticed. A tied parameter may have any of its names there.
    """
    tensors = {**dict(root.named_parameters()), **dict(root.named_buffers())}
    filled = set(_adapter_inits(root))
    if hasattr(root, "init_buffers"):
        filled |= {name for name, _ in root.named_buffers()}
    needed = [name for name in persistent(root) if name not in filled]
    missing = [name for name in needed if not any(known in state for known in names[name])]
    known_names = {known for some in names.values() for known in some}
    left_over = [name for name in state if name not in known_names]
    fault = ""
    if missing or left_over:
        fault = f"has no {missing[0]}" if missing else f"has {left_over[0]}, which the model has not"
        fault += f" ({len(missing or left_over)} in all)"
    for name, some in names.items() if not fault else ():
        held, target = [known for known in some if known in state], tensors[name]
        for known in held:
            stored = state[known]
            if stored.shape != target.shape:
                fault = f"has {known} as {tuple(stored.shape)}, the model as {tuple(target.shape)}"
            elif target.is_floating_point() and not stored.is_floating_point():
                fault = (
                    f"has {known} as {stored.dtype}, such as quantized weights, the model as {target.dtype}"
                )
            elif known != held[0] and not same_values(state[held[0]], stored):
                fault = f"has different {held[0]} and {known}, and the model has them as one tensor"
    if fault:
        raise ConfigError(f"{source} {fault}.", SAME_MODEL)


SAME_MODEL = (
    "unquantized weights under the model's own names: python -m fsdp.checkpoint RUN export writes "
    "such a file; with --model.preset and --model.args as they were trained with"
)


def build_on_host(spec: ModelSpec, seed: int) -> nn.Module:
    """The real model. Memory that its constructor leaves uninitialised reads NaN, and the check names it."""
    fills: Any = torch.utils.deterministic
    was, filled = torch.are_deterministic_algorithms_enabled(), fills.fill_uninitialized_memory
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    fills.fill_uninitialized_memory = True
    try:
        with seeded(seed), torch.device("cpu"):
            return spec.build()
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn)
        fills.fill_uninitialized_memory = filled


def _send_all(
    sharded: Sharded, open_source: Callable[[], Take], added: Mapping[str, Init], rank: int
) -> None:
    """An error on rank 0, which alone opens the source, is sent to all: no rank waits for weights."""
    opened: list[Take] = []
    on_main(rank, lambda: opened.append(open_source()))
    root = sharded.root
    with torch.no_grad():
        for name, target in [*root.named_parameters(), *_sent_buffers(root)]:
            if name not in added:
                whole = sharded.sizes.tensor > 1 or sharded.sizes.expert > 1 or shard_count(target) == 1
                send = _broadcast_whole if whole else _scatter_rows
                send(target, opened[0](name) if opened else None, sharded, is_source=bool(opened))


def _broadcast_whole(target: Tensor, full: Tensor | None, _: Sharded, *, is_source: bool) -> None:
    """Each rank keeps its part."""
    part = local_tensor(target)
    whole = _or_own(full, target) if is_source else part.new_empty(target.shape)
    wire = _bytes(whole).to(part.device)
    dist.broadcast(wire, src=0)
    part.copy_(wire.view(part.dtype).view(target.shape)[box_of(target).slices])


def _scatter_rows(target: Tensor, full: Tensor | None, sharded: Sharded, *, is_source: bool) -> None:
    """Sends a piece to each shard of the first replica, then along dp_replicate: rank 0 sends the model
    once, whatever the number of ranks.
    """
    part, count = local_tensor(target), shard_count(target)
    chunk = -(-target.shape[0] // count) * target.shape[1:].numel() * part.element_size()
    if not chunk:
        return
    fits = part.is_contiguous() and part.nbytes == chunk
    # Straight into the shard, but where its rows end early: a second shard's memory would stand beside the
    # whole.
    received = _bytes(part) if fits else torch.empty(chunk, dtype=torch.uint8, device=part.device)
    if dist.get_rank() < count:
        pieces = (
            _padded_pieces(_bytes(_or_own(full, target)).to(part.device), chunk, count) if is_source else None
        )
        dist.scatter(received, pieces, src=0, group=sharded.mesh.get_group("dp_shard"))
    if sharded.sizes.replicate > 1:
        dist.broadcast(received, src=dist.get_rank() % count, group=sharded.mesh.get_group("dp_replicate"))
    if not fits:
        part.copy_(received[: part.nbytes].view(part.dtype).view(part.shape))


def _padded_pieces(wire: Tensor, chunk: int, count: int) -> list[Tensor]:
    """Scatter takes equal pieces: views where the rows exist, one padded copy where they end."""
    pieces = []
    for at in range(0, count * chunk, chunk):
        piece = wire[at : at + chunk]
        pieces.append(
            piece if piece.numel() == chunk else torch.cat([piece, piece.new_zeros(chunk - piece.numel())])
        )
    return pieces


def _bytes(tensor: Tensor) -> Tensor:
    """Raw bytes: neither gloo nor NCCL sends complex, and gloo not every small float."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _or_own(full: Tensor | None, target: Tensor) -> Tensor:
    """If the source has no value, the present one is sent: that of init_buffers, or the poison for the
    check.
    """
    if full is not None:
        return full.detach().to(dtype=target.dtype)
    if not isinstance(target, DTensor):
        return target
    whole = torch.empty(target.shape, dtype=target.dtype)
    fill_with_poison(whole)
    return whole
