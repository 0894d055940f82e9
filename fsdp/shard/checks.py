"""Checks of a model as it is sharded: the device's support, initial values, the first forward, and errors of
a forward in a line with a HINT.

Initial values: memory is poisoned before it is filled and searched after, and digests of all ranks are
compared.

The first forward: what FSDP does not see there is lost, or ends the process. A gathered parameter is a copy
for one step: what a forward writes there (weights that are clipped; a momentum encoder, as MoCo's) is lost. A
unit that is freed after its forward is gathered again when the gradient of its output arrives. No such
gradient is seen in an object that is no container, nor in a view that is written in place after the forward:
backward would read freed memory. A unit that torch.func.functional_call calls with other weights gathers its
own ones in their place.

Not here: what fills the memory (materialize.py), buffers, which each rank keeps whole, and checks that need
no device (fsdp/config/checks_memory.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.base.devices import as_int64, combine
from fsdp.base.errors import ConfigError, TrainingError
from fsdp.base.torch_private import (
    frees_after_forward,
    is_written,
    parameter_groups,
    parameter_name,
    replaced_parameter,
    seen_tensors,
    tree_leaves,
    viewed,
    writes,
)
from fsdp.config import MemorySection
from fsdp.distributed.boxes import box_of, digest_share, local_tensor
from fsdp.distributed.collectives import all_gather_objects
from fsdp.models.registry import IGNORED
from fsdp.models.units import clean_name

GATHERED = "--mesh.reshard_after_forward false"
PLAIN = (Tensor, str, bytes, int, float, complex, type(None))


def check_device(memory: MemorySection, device: torch.device) -> None:
    """Refuses --memory.* flags that the device does not support. ConfigError, on every rank the same."""
    if memory.nvme != "off" and device.type != "cpu" and not memory.cpu_offload:
        raise ConfigError(
            f"--memory.nvme {memory.nvme} keeps the optimizer on the host, parameters are on {device.type}.",
            "--memory.cpu_offload true",
        )


# ---------------------------------------------------------------- initial values


def poison(root: nn.Module) -> None:
    """NaN in floats, a rare value in integers: a value that is still there at the end was never
    initialised.
    """
    with torch.no_grad():
        for tensor in [*root.parameters(), *root.buffers()]:
            fill_with_poison(local_tensor(tensor))


def fill_with_poison(part: Tensor) -> None:
    if part.is_floating_point() or part.is_complex():
        part.fill_(float("nan"))
    else:
        part.view(_plain(part.dtype)).fill_(_rare(part.dtype))


def _plain(dtype: torch.dtype) -> torch.dtype:
    """A bool's byte can hold a value that is neither True nor False."""
    return torch.uint8 if dtype == torch.bool else dtype


def _rare(dtype: torch.dtype) -> int:
    return torch.iinfo(_plain(dtype)).max - 41


@torch.no_grad()
def check_initialised(root: nn.Module, *, restored: bool = False) -> None:
    """Stops the run by name for a value left uninitialised, a buffer nobody filled, or replicas that differ.
    `restored`: a checkpoint fills and checks what it holds. Collective.
    """
    known = root.state_dict().keys() if restored else ()
    everyones = all_gather_objects([*_unfilled(root, known)])
    for rank, names in enumerate(everyones):
        if names:
            raise TrainingError(
                f"rank {rank}: {names[0]} was never initialised, or is NaN ({len(names)} in all).",
                FILL,
                ranks=(rank,),
            )
    tables = [] if restored else _digests(root)
    for row, (name, _) in enumerate([*root.named_parameters(), *root.named_buffers()] if tables else ()):
        holders: dict[tuple[int, int], tuple[int, int]] = {}
        for rank, table in enumerate(tables):
            start, numel, digest = table[row].tolist()
            other, same = holders.setdefault((start, numel), (rank, digest))
            if digest != same:
                fault = f"{name} differs between ranks {other} and {rank}, which hold the same shard"
                raise TrainingError(f"{fault}.", FILL)


FILL = "the model's initialisation, or its weights, must fill every parameter and buffer on each rank"


def _unfilled(root: nn.Module, known: Container[str]) -> Iterator[str]:
    for kind, named in (("parameter", root.named_parameters()), ("buffer", root.named_buffers())):
        for name, tensor in named:
            part = local_tensor(tensor)
            if name not in known and (part.is_meta or (part.numel() and _is_poisoned(part))):
                yield f"{kind} {name}"


def _is_poisoned(part: Tensor) -> bool:
    if part.is_floating_point() or part.is_complex():
        return bool(part.isnan().any())
    return bool((part.view(_plain(part.dtype)) == _rare(part.dtype)).all())


def _digests(root: nn.Module) -> list[Tensor]:
    """Every rank's table, with a row for each tensor: the start and numel of its part, the digest's share."""
    rows = []
    for tensor in [*root.parameters(), *root.buffers()]:
        box = box_of(tensor)
        rows.append([box.start, box.numel, as_int64(digest_share(local_tensor(tensor), box))])
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    tables = [torch.empty_like(table) for _ in range(dist.get_world_size())]
    dist.all_gather(tables, table)
    return tables


def state_digest(root: nn.Module) -> dict[str, int]:
    """One number a tensor for the whole model, equal at any number of ranks. Collective."""
    tables = _digests(root)
    whole: dict[str, int] = {}
    for row, (name, _) in enumerate([*root.named_parameters(), *root.named_buffers()]):
        parts = {start: share for start, numel, share in (t[row].tolist() for t in tables) if numel}
        whole[name] = combine([*parts.values()])
    return whole


# ---------------------------------------------------------------- the first forward


def check_first_forward(
    root: nn.Module, compiled: Collection[nn.Module], *, gathers_own: bool, later_too: bool = False
) -> None:
    """Called when the weights are real. `compiled` modules are left out: a hook would break their graph.
    `gathers_own`: an all-gather of the user may change the values. `later_too`: the caller of the model is a
    loop of the user, which may replace weights in any forward.
    """
    views: list[tuple[str, Tensor, int]] = []
    names = {module: clean_name(name) for name, module in root.named_modules()}
    for group in parameter_groups(root):
        for module in group.modules:
            if module not in compiled:
                _once(module, partial(_check_unit, names[module], group, views, gathers_own))
                _check_replaced(root, module, group, later_too)
    if root not in compiled:
        _once(root, partial(_check_views, views))


def _once(module: nn.Module, check: Callable[[object], None]) -> None:
    """Calls `check` with the output of the module's first forward in training."""

    def hook(module: nn.Module, inputs: object, output: object) -> None:
        if module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            handle.remove()
            check(output)

    handle = module.register_forward_hook(hook, prepend=True)  # before FSDP's own, which frees the parameters


def _check_replaced(root: nn.Module, module: nn.Module, group: Any, later_too: bool) -> None:
    """Refuses weights in the place of the group's, before the module's first forward in training."""

    def hook(module: nn.Module, inputs: object) -> None:
        if torch.compiler.is_compiling():
            return
        if module.training and torch.is_grad_enabled() and not later_too:
            handle.remove()
        replaced = replaced_parameter(group)
        if replaced is not None:
            name = next((name for name, held in root.named_parameters() if held is replaced), "a parameter")
            raise ConfigError(
                f"torch.func.functional_call replaces {clean_name(name)}, in whose place FSDP gathers the "
                "model's own: the weights that it is called with would be ignored.",
                "functional_call on a module inside of a unit, or --mesh.strategy ddp",
                scope="rank",
            )

    # before FSDP's own hook, which puts the gathered parameters there
    handle = module.register_forward_pre_hook(hook, prepend=True)


def _check_unit(
    name: str, group: Any, views: list[tuple[str, Tensor, int]], gathers_own: bool, output: object
) -> None:
    written = [p for p in group.fsdp_params if is_written(p)] if not gathers_own else []
    if written:
        raise ConfigError(
            f"the forward writes into {clean_name(parameter_name(written[0]))}, which is gathered for this "
            "step alone: its shards do not change.",
            # A save copies parameters during the next forward.
            "register_buffer for what forward changes, or --mesh.strategy ddp --checkpoint.mode blocking",
            scope="rank",
        )
    if not frees_after_forward(group):
        return
    seen = seen_tensors(output)
    views += [(name, tensor, writes(tensor)) for tensor in seen if viewed(tensor) is not None]
    hidden = [leaf for leaf in tree_leaves(output) if not isinstance(leaf, PLAIN)]
    if hidden and not seen:
        raise ConfigError(
            f"{name} returns a {type(hidden[0]).__name__}, in which FSDP finds no tensors: it would not "
            f"gather {name} for its backward.",
            f"return tensors, or a tuple, list, dictionary or dataclass of them; or {GATHERED}",
        )


def _check_views(views: list[tuple[str, Tensor, int]], output: object) -> None:
    name = next((name for name, tensor, before in views if writes(tensor) != before), None)
    views.clear()
    if name is not None:
        raise ConfigError(
            f"the output of {name} is a view, and the forward writes into it afterwards (x += y): "
            f"FSDP would not gather {name} for its backward.",
            f"x = x + y in place of x += y, or {GATHERED}",
        )


# ---------------------------------------------------------------- errors of a forward

REPEATED = (
    "torch.utils.checkpoint",
    "backward but not found in storage",
    "cached during selective activation checkpoint has been mutated",
)
STALE = "keeps parameters as they were before sharding, which replaces them"
STALE_HINT = (
    "nn.ParameterList or nn.ParameterDict in its place, or look them up in forward: self.layer.weight"
)
GRADIENT_HINT = (
    "take that gradient inside of the model's forward, with --mesh.wrap root; or --mesh.strategy ddp"
)
EXPLAINED: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (REPEATED, "a unit's forward computes something else when backward repeats it: it changes its state",
     "--memory.activation_checkpointing none"),
    (("No available kernel",), "--speed.attention: the kernel does not compute this dtype, head size or mask",
     "--speed.attention auto"),
    (("out of bounds for storage of size 0",), "backward reads a parameter that FSDP has freed, as after a "
     "first backward or autograd.grad", GRADIENT_HINT),
    (("DTensor",), "the forward computes with a parameter of which this rank has a shard alone: outside "
     "of its unit's forward, or after autograd.grad",
     "--mesh.wrap root, or --mesh.wrap class:NAME of the class whose forward computes with it"),
    (("on meta", "device meta"), f"a list or dictionary of a module {STALE}", STALE_HINT),
    (("index out of range in self",), "an embedding of the model is read beyond its rows",
     "ids from 0; more rows there, or fewer tokens in the data (--data.seq_len)"),
    (("is out of bounds.", "scalar type Long", "target dtype"), "a target is not the index of a class",
     f"whole targets from 0, or {IGNORED}; a model with more classes, or its own loss"),
)  # fmt: skip
"""Words of torch's errors, which have no class of their own; what they mean here, and what helps."""


def explained(error: Exception) -> Exception:
    """The ConfigError for a forward that does not fit its data or its sharding, or cannot be recomputed;
    others as they are.
    """
    text = str(error)
    for words, fault, hint in EXPLAINED:
        if any(word in text for word in words):
            detail = " ".join(text.split("\n")[0].split())
            return ConfigError(f"{fault} ({detail[:160]}).", hint, scope="rank")
    return error


def stale_reference(name: str) -> ConfigError:
    return ConfigError(f"{name} {STALE}.", STALE_HINT)
