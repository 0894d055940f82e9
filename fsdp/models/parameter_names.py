"""Names of parameters and buffers: all names of a tied tensor, and names without those of wrappers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from fsdp.base.torch_private.names import WRAPPER_NAMES


def names_by_tensor(named: Iterable[tuple[str, Tensor]]) -> dict[Tensor, list[str]]:
    """Each tensor with all of its names, in their order; a tied tensor has several."""
    names: dict[Tensor, list[str]] = {}
    for name, tensor in named:
        names.setdefault(tensor, []).append(name)
    return names


def all_names(model: nn.Module) -> dict[str, list[str]]:
    """The first name of each parameter and buffer, with all names of that tensor."""
    named: list[tuple[str, Tensor]] = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {names[0]: names for names in names_by_tensor(named).values()}


def first_names(model: nn.Module) -> dict[str, str]:
    """Each name of a parameter or buffer, with the first name of that tensor."""
    return {name: names[0] for names in all_names(model).values() for name in names}


def names_in_state(model: nn.Module) -> dict[str, list[str]]:
    """Each name of a model's state dict, with all names of that tensor."""
    state = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    names = names_by_tensor(state.items())
    return {name: names[tensor] for name, tensor in state.items()}


def clean_name(name: str, *, ddp: bool = False) -> str:
    """A name without the parts that wrappers put into it; `ddp` also removes the leading `module.` of DDP."""
    if ddp:
        name = name.removeprefix("module.")
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES)
