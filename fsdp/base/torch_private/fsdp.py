"""FSDP2's parameter groups: what they hold, and context managers around their methods and functions.

FSDP2 has public switches, but no public way to the tensors that a group holds, to the order of its
reductions, or to the moments in which it communicates. A context manager puts back what it found, also when
its body raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, _common_utils
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

COLLECTIVE_FUNCTIONS = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")
"""Functions of FSDP in which a new tensor is a buffer of a collective."""

Run = Callable[[], Any]
AroundCollective = Callable[[Run, Sequence[Tensor]], Any]
"""Calls the first argument once and returns its result. The second holds the unsharded gradients that a
reduction receives, and is empty for an all-gather.
"""
AroundMethod = Callable[[Any, Run], Any]
"""Receives a parameter group and its method as a call without arguments; returns the call's result."""


@contextlib.contextmanager
def _replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


# ---------------------------------------------------------------- what a group holds


def parameter_groups(root: nn.Module) -> Iterator[FSDPParamGroup]:
    """The parameter groups of all modules. torch 2.11 has at most one a module, 2.13 and 2.15 a list.

    Without them: no account of memory by kind, no check that ranks run the same branches, no parameters in
    files.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            yield from (group for group in (groups or [state._fsdp_param_group]) if group is not None)


def tensors_by_kind(group: FSDPParamGroup) -> Iterator[tuple[str, Tensor | None]]:
    """(parameters, gathered or gradients; tensor) of all that a group holds.

    Several exist only after the first gather or reduction. One under another name is counted as activations.
    """
    for parameter in group.fsdp_params:
        yield from (("parameters", parameter.sharded_param), ("parameters", parameter._sharded_param_data))
        yield from (("gathered", tensor) for tensor in parameter.all_gather_outputs)
        gathered = getattr(parameter, "_unsharded_param", None)
        if gathered is not None:
            yield from (("gathered", gathered), ("gradients", gathered.grad))
        yield "gathered", getattr(parameter, "_sharded_post_forward_param_data", None)
        yield from (
            ("gradients", accumulated_gradient(parameter)),
            ("gradients", parameter.sharded_param.grad),
        )
    yield "gradients", getattr(group, "_partial_reduce_output", None)


def gathered_gradient(parameter: FSDPParam) -> Tensor | None:
    """The gradient of the gathered parameter, before FSDP takes it for a reduction."""
    gathered = getattr(parameter, "_unsharded_param", None)
    return None if gathered is None else gathered.grad


def accumulated_gradient(parameter: FSDPParam) -> Tensor | None:
    """The unreduced gradient of several micro-batches in the reduction's dtype. torch 2.15 keeps it in the
    gathered parameter's .grad and returns that here.
    """
    found: Tensor | None = getattr(parameter, "unsharded_accumulated_grad", None)
    return found


def sharded_gradient(parameter: FSDPParam) -> Tensor | None:
    """The reduced gradient of this rank's shard."""
    return parameter.sharded_param.grad if parameter.sharded_param is not None else None


def move_padded_shard(parameter: FSDPParam, make: Callable[[Tensor], Tensor]) -> None:
    """Replaces the padded data under a sharded parameter by `make(data)`; the parameter becomes a view of it.

    FSDP allocates the padding itself, in memory. Without this, parameters that rest in files stay in memory
    too.
    """
    room = make(parameter._sharded_param_data)
    sharded: Any = parameter.sharded_param
    rows = sharded._local_tensor.shape
    parameter._sharded_param_data = room
    sharded._local_tensor = room[: rows.numel()].view(rows)


def padded_shard(parameter: FSDPParam) -> Tensor:
    """This rank's shard, flat, with the padding that makes all ranks' shards equally long."""
    return parameter._sharded_param_data


def is_written(parameter: FSDPParam) -> bool:
    """Whether a forward has written into the gathered parameter, or put other memory under it; to be called
    before FSDP frees it. False for a weight that is gathered in another form (float8).

    Without it, a model whose forward updates its own parameters trains without these updates.
    """
    whole, rooms = getattr(parameter, "_unsharded_param", None), parameter.all_gather_outputs
    if whole is None or len(rooms) != 1 or hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather"):
        return False
    if whole.untyped_storage().data_ptr() != rooms[0].untyped_storage().data_ptr():
        return True
    own = padded_shard(parameter)
    mesh: Any = parameter.mesh_info
    gathered = rooms[0].narrow(0, mesh.shard_mesh_rank * own.numel(), own.numel())
    # Bytes, so that a NaN is equal to itself.
    as_gathered = own.to(gathered.device, gathered.dtype)
    return not torch.equal(as_gathered.view(torch.uint8), gathered.view(torch.uint8))


def replaced_parameter(group: FSDPParamGroup) -> Tensor | None:
    """The first tensor that a module has in the place of its parameter, as torch.func.functional_call puts it
    there; to be called before the group's forward.

    Without it, FSDP gathers the parameter into the module, and the other tensor is ignored in silence.
    """
    for parameter in group.fsdp_params:
        info = parameter._module_info
        held = info.module._parameters.get(info.param_name)
        if held is None or any(
            held is mine for mine in (parameter.sharded_param, getattr(parameter, "_unsharded_param", None))
        ):
            continue
        if not (isinstance(held, DTensor) and isinstance(held, nn.Parameter)):  # a shard, loaded anew
            return held
    return None


def frees_after_forward(group: FSDPParamGroup) -> bool:
    """Whether the gathered parameters are freed after forward, and gathered again for backward."""
    return group.post_forward_mesh_info is not None


def seen_tensors(output: Any) -> Sequence[Tensor]:
    """The tensors of a forward's output that need a gradient and at which FSDP starts the module's backward.
    torch 2.11 does not find those in a dataclass.

    Without it, a unit whose output hides its tensors ends the process in backward, by a signal.
    """
    find = getattr(_common_utils, "collect_grad_tensors", None)
    if find is not None:
        found: Sequence[Tensor] = find(output)
        return found
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]


# ---------------------------------------------------------------- what a group does


def forward_order(group: FSDPParamGroup) -> list[FSDPParamGroup]:
    """The groups of all modules in the order of their forwards; emptied when the root's backward ends."""
    return group.comm_ctx.post_forward_order


def unreduced_groups(groups: Sequence[FSDPParamGroup]) -> list[tuple[int, list[bool]]]:
    """(index of a group whose backward has not ended, which of its parameters hold a gradient).

    Without it, a rank that leaves out a branch of the root's own group is not found.
    """
    done = TrainingState.POST_BACKWARD
    return [
        (index, [_has_unreduced(parameter) for parameter in group.fsdp_params])
        for index, group in enumerate(groups)
        if group._training_state is not done
    ]


def _has_unreduced(parameter: FSDPParam) -> bool:
    return accumulated_gradient(parameter) is not None or gathered_gradient(parameter) is not None


def group_name(group: FSDPParamGroup) -> str:
    """Its module's name in the root; empty for the root. FSDP sets it in the first forward."""
    return group._module_fqn or ""


def parameter_name(parameter: FSDPParam) -> str:
    """Its name in the root. FSDP sets it in the first forward."""
    name: Any = parameter._param_fqn
    return name


def gathers(group: FSDPParamGroup) -> bool:
    """Whether an all-gather of this group is started and not yet waited for."""
    return group._all_gather_result is not None


def reduces(group: FSDPParamGroup) -> bool:
    """Whether an earlier group's reduce-scatter is under way: a state in torch 2.11, a list of them since
    2.13.
    """
    context: Any = group.comm_ctx
    one = hasattr(context, "reduce_scatter_state")
    return bool(context.reduce_scatter_state if one else context.reduce_scatter_states)


# ---------------------------------------------------------------- patches


@contextlib.contextmanager
def around_collectives(around: AroundCollective) -> Iterator[None]:
    """`around` runs FSDP's functions of COLLECTIVE_FUNCTIONS; one that this torch lacks is left out.

    FSDP looks them up in its module at each call. Without it, buffers of collectives are counted as
    activations.
    """
    with contextlib.ExitStack() as patches:
        for name in COLLECTIVE_FUNCTIONS:
            if hasattr(_fsdp_param_group, name):
                patches.enter_context(_replaced(_fsdp_param_group, name, _call_around(around, name)))
        yield


def _call_around(around: AroundCollective, name: str) -> Callable[..., Any]:
    function = getattr(_fsdp_param_group, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        # Its list, not a copy: FSDP empties it to free the gradients.
        gradients = args[1] if name == "foreach_reduce" else ()
        return around(lambda: function(*args, **kwargs), gradients)

    return call


@contextlib.contextmanager
def before_reductions(note: Callable[[list[FSDPParam]], None]) -> Iterator[None]:
    """Calls `note` with the parameters of each reduction before it starts.

    Without it, ranks that reduce the gradient of one parameter into another are not found.
    """
    function = _fsdp_param_group.foreach_reduce

    def foreach_reduce(parameters: list[FSDPParam], *rest: Any, **named: Any) -> Any:
        note(parameters)
        return function(parameters, *rest, **named)

    with _replaced(_fsdp_param_group, "foreach_reduce", foreach_reduce):
        yield


@contextlib.contextmanager
def around_methods(
    methods: Iterable[tuple[str, AroundMethod]], owner: Any = FSDPParamGroup, *, required: bool = True
) -> Iterator[None]:
    """Each function runs the method of FSDPParamGroup of that name: unshard, wait_for_unshard, post_backward
    or finalize_backward. Unless `required`, a method that this torch lacks is left out.

    The compute stream waits in wait_for_unshard and finalize_backward alone. Without them, the time that a
    step waits for communication reads as zero, and a plan has no order of communication.
    """
    with contextlib.ExitStack() as patches:
        for name, around in methods:
            if required or hasattr(owner, name):
                patches.enter_context(_replaced(owner, name, _method_around(getattr(owner, name), around)))
        yield


def _method_around(method: Callable[..., Any], around: AroundMethod) -> Callable[..., Any]:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        return around(group, lambda: method(group, *args, **kwargs))

    return call


@contextlib.contextmanager
def copies_of_offloaded(copies: bool) -> Iterator[None]:
    """With `copies`, FSDP gathers from a copy of each shard, as it does from shards in the host's memory.

    Without it, a plan of fake tensors, which are all of one device, has no copies of offloaded parameters.
    """
    plain: Any = FSDPParam.all_gather_inputs

    def all_gather_inputs(parameter: Any) -> Any:
        if parameter.sharded_state is not ShardedState.SHARDED:
            return plain.fget(parameter)
        shard, parameter._sharded_param_data = parameter._sharded_param_data, None
        try:
            parameter._sharded_param_data = torch.empty_like(shard)
            return plain.fget(parameter)
        finally:
            parameter._sharded_param_data = shard

    with _replaced(FSDPParam, "all_gather_inputs", property(all_gather_inputs) if copies else plain):
        yield


@contextlib.contextmanager
def after_resizes(note: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Calls `note` with each storage whose resize_ is called from Python: FSDP gathers into such storages and
    empties them so, which no dispatch mode sees.

    Without it, gathered parameters are counted at their first size for the whole run.
    """
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        note(storage)
        return result

    with _replaced(torch.UntypedStorage, "resize_", resize_):
        yield


@contextlib.contextmanager
def chunks_by(cut: Callable[[Tensor, int, int], Any]) -> Iterator[None]:
    """FSDP cuts parameters by `cut(tensor, count, dim)`, of whose result it reads two items, in place of a
    list of all chunks. A torch that cuts in another way is left as it is: a plan for many ranks takes longer.
    """
    if not hasattr(_fsdp_param, "_chunk_with_empty"):
        yield
        return
    with _replaced(_fsdp_param, "_chunk_with_empty", cut):
        yield
