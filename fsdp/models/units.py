"""Selects the communication units: the model's units(), its repeated blocks, N of them, a class, or a size.

A unit is a list of modules whose parameters are gathered together; parameters in no unit belong to the root.
Only the selection is here, on plain modules; fsdp/shard/shard.py shards the units. And the names of a
model's tensors: all names of a tied one, and names without those of wrappers; and of modules that hold more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.base.torch_private import WRAPPER_NAMES, tree_leaves

Unit = list[nn.Module]

LARGE_LAYER = 1 << 20
"""Parameters from which a single layer gets its own collective; below it only blocks of layers do."""

# They have no forward: nothing would gather them.
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_CONTAINERS = (*_HOLDERS, nn.Sequential)
_ROOT = -1


def find_units(model: nn.Module, wrap: str = "auto") -> list[Unit]:
    """Returns the units of --mesh.wrap, in forward order but inner ones first, without the root."""
    kind, _, value = wrap.partition(":")
    if kind == "class":
        chosen = _of_class(model, value.split(","))
    elif kind == "size":
        chosen = [[module] for module in _of_size(model, int(value))]
    elif kind == "root":
        chosen = []
    elif callable(getattr(model, "units", None)):
        chosen = _own_units(model)
    else:
        chosen = [[module] for module in _repeated(model)]
    units = _without_shared(model, _inner_first(_distinct(model, chosen)))
    return _joined(units, int(value)) if kind == "every" else units


def blocks_of(units: Sequence[Unit]) -> list[nn.Module]:
    """Returns the blocks to recompute in backward: composite modules that are units, or of one class in a
    unit; without embedding or head.
    """
    alike = [unit for unit in units if len({type(module) for module in unit}) == 1]
    return [module for unit in alike for module in unit if next(module.children(), None) is not None]


def norms_beside(blocks: Sequence[nn.Module], model: nn.Module) -> list[nn.Module]:
    """Returns the norms outside of the blocks, layers of vectors alone, as transformers' final RMSNorm;
    without torch's own, each of which is one kernel.
    """
    inside = {module for block in blocks for module in block.modules()}
    layers = [m for m in model.modules() if m not in inside and not [*m.children(), *m.buffers()]]
    own = [layer for layer in layers if not type(layer).__module__.startswith("torch.")]
    return [layer for layer in own if {p.dim() for p in layer.parameters()} == {1}]


WRAP_HINT = "--mesh.wrap class:NAME says which modules are units"


def _joined(units: Sequence[Unit], count: int) -> list[Unit]:
    """Joins up to `count` consecutive units that are single blocks of one class."""
    joined: list[Unit] = [[]]
    for unit in units:
        last = joined[-1]
        one_class = len({type(module) for module in (*last, *unit)}) == 1
        if last and one_class and len(last) + len(unit) <= count and blocks_of([unit]):
            last += unit
        else:
            joined.append(list(unit))
    return joined[1:]


# ---------------------------------------------------------------- the model's units()


def _own_units(model: nn.Module) -> list[Unit]:
    declared: Any = model.units()  # type: ignore[operator]
    return [list(unit) if isinstance(unit, (list, tuple)) else [unit] for unit in declared]


# ---------------------------------------------------------------- repeated blocks


def _members(container: nn.Module) -> list[nn.Module]:
    """The modules in a container, as often as they stand in it."""
    named = container.named_modules(remove_duplicate=False)
    return [member for name, member in named if name and "." not in name]


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost repeated modules: members of one class in a list, at any depth. Containers are
    searched, not yielded. Experts are none: a rank gathers a unit only where it calls it.
    """
    members = _members(module) if isinstance(module, _CONTAINERS) else []
    # Counts occurrences, not distinct modules: one block that is applied six times is repeated.
    counts = Counter(type(member) for member in members if _is_block(member))
    for name, child in module.named_children():
        if counts[type(child)] > 1 and _is_block(child):
            yield child
        elif not holds_experts(name, child):
            yield from _repeated(child)


def _is_block(module: nn.Module) -> bool:
    """Whether it is a composite module, or a layer too large to be gathered with its neighbours. Alternating
    Linear and ReLU layers are not blocks.
    """
    if isinstance(module, _HOLDERS):
        return False
    numel = sum(parameter.numel() for parameter in module.parameters())
    if type(module) is nn.Sequential:
        return numel >= LARGE_LAYER and next(_repeated(module), None) is None
    is_layer = next(module.children(), None) is None
    return numel >= (LARGE_LAYER if is_layer else 1)


def holds_experts(name: str, module: nn.Module) -> bool:
    """Whether a list or dict of that name holds experts: one that no token of a batch selects is not called,
    and the ranks select different ones.
    """
    return name.endswith("experts") and isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) > 1


def has_separate_experts(module: nn.Module) -> bool:
    """Whether its experts are modules in a list or a dict."""
    return any(holds_experts(name, child) for name, child in module.named_modules())


# ---------------------------------------------------------------- by class, by size


def _of_class(model: nn.Module, names: Sequence[str]) -> list[Unit]:
    present = {type(m).__name__: m for m in model.modules() if next(m.parameters(), None) is not None}
    usable = [name for name, m in present.items() if not isinstance(m, _HOLDERS) and m is not model]
    for name in names:
        if name not in usable:
            raise ConfigError(
                f"--mesh.wrap class:{name}: {type(model).__name__} has no such class with parameters, "
                f"only {', '.join(usable[:20]) or 'itself'}.",
                "--mesh.wrap auto",
            )
    return [[module] for module in model.modules() if type(module).__name__ in names]


def _of_size(model: nn.Module, least: int) -> list[nn.Module]:
    """As FSDP1's size_based_auto_wrap_policy: selects, from the leaves up, modules with `least` parameters
    that are in no unit yet.
    """
    chosen: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> int:
        """Returns how many parameters of the module are in units."""
        numel = sum(parameter.numel() for parameter in module.parameters())
        if module in chosen:
            return numel
        # As FSDP1: attention uses its output projection's weight without calling it, so its parent holds it.
        if numel < least or isinstance(module, nn.MultiheadAttention):
            return 0
        inside = sum(visit(child) for child in module.children())
        if numel - inside < least or isinstance(module, _HOLDERS):
            return inside
        chosen[module] = None
        return numel

    visit(model)
    return list(chosen)


# ---------------------------------------------------------------- for every selection


def _distinct(model: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """Removes the root, duplicates, modules inside another of their unit, and modules without parameters."""
    seen: set[nn.Module] = {model}
    distinct: list[Unit] = []
    for unit in units:
        fresh = [m for m in dict.fromkeys(unit) if m not in seen and next(m.parameters(), None) is not None]
        inside = {inner for outer in fresh for inner in outer.modules() if inner is not outer}
        fresh = [m for m in fresh if m not in inside]
        seen.update(fresh)
        distinct += [fresh] if fresh else []
    return distinct


def _levels(units: Sequence[Unit]) -> list[int]:
    """Returns, for each unit, the number of units that contain it."""
    insides = [
        {inner for module in unit for inner in module.modules() if inner not in unit} for unit in units
    ]
    return [sum(any(module in inside for module in unit) for inside in insides) for unit in units]


def _inner_first(units: list[Unit]) -> list[Unit]:
    # fully_shard skips parameters of an earlier call, so an inner unit must come before its outer one.
    levels = _levels(units)
    return [units[at] for at in sorted(range(len(units)), key=lambda at: -levels[at])]


def _without_shared(model: nn.Module, units: list[Unit]) -> list[Unit]:
    """Drops units that share a parameter (tied, or a module used in both), which must be in one group: the
    inner units are dropped, and their parameters go to the enclosing unit, finally to the root.
    """
    while True:
        levels = {_ROOT: _ROOT, **dict(enumerate(_levels(units)))}
        given_up: set[int] = set()
        for owners in _owners(model, units).values():
            if len(owners) > 1:
                deepest = max(levels[owner] for owner in owners)
                given_up |= {owner for owner in owners if levels[owner] == deepest}
        if not given_up:
            return units
        units = [unit for at, unit in enumerate(units) if at not in given_up]


def _owners(model: nn.Module, units: Sequence[Unit]) -> dict[nn.Parameter, set[int]]:
    """Maps each parameter to its groups: the innermost one around each use."""
    unit_of = {module: at for at, unit in enumerate(units) for module in unit}
    owners: dict[nn.Parameter, set[int]] = {}
    seen: set[tuple[nn.Module, int]] = set()
    stack = [(model, _ROOT)]
    while stack:
        module, owner = stack.pop()
        owner = unit_of.get(module, owner)
        if (module, owner) in seen:
            continue
        seen.add((module, owner))
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(owner)
        stack += [(child, owner) for child in module.children()]
    return owners


# ---------------------------------------------------------------- names of tensors


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


# ---------------------------------------------------------------- modules that hold more

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module, such as its dictionaries of parameters and buffers."""


def kept_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that modules keep as plain attributes, or in lists and dictionaries: they are not moved or
    saved.
    """
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, (Tensor, list, tuple, dict)) and key not in _OF_MODULES:
                tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
                yield from ((f"{name + '.' if name else ''}{key}", leaf) for leaf in tensors)


def batch_norms(model: nn.Module) -> list[str]:
    """The names of modules whose result depends on how a global batch is split over ranks and micro-batches.
    transformers and timm have classes of their own with BatchNorm as a base.
    """
    return [name for name, module in model.named_modules() if isinstance(module, BATCH_NORMS)]
