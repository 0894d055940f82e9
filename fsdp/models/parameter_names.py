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


def clean_name(name: str, *, ddp: bool = False) -> str:
    """A name without the parts that wrappers put into it; `ddp` also removes the leading `module.` of DDP."""
    if ddp:
        name = name.removeprefix("module.")
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES)
