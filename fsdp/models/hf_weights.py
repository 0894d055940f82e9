"""Weights of a model of transformers: its tensors in a folder, random ones module by module, and the folder
of a hub id, downloaded where it is absent.

The rules of names (renamed, fused and split tensors) are transformers' own, its conversion mapping. Both
directions are computed on meta tensors first: a tensor's place and shape are known before any byte is read.
Random weights of a module are a function of the seed and its name: no more than one module is held. Not here:
files (fsdp/checkpoint/pretrained.py), or who receives them (fsdp/shard/materialize.py).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.base.proc import cache_folder
from fsdp.models.init import name_seed
from fsdp.models.units import all_names, first_names
from fsdp.tokenize.rows import NO_WEIGHTS, locked

log = logging.getLogger(__name__)

_FLAG = "_is_hf_initialized"
"""transformers' mark on a tensor that its init functions leave unchanged."""
Shape = tuple[int, ...]


@dataclass
class Conversion:
    """Tensors of a file from which transformers computes tensors of the model."""

    rule: Any
    target: str
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Pattern → names in the files, in the order in which the rule reads them."""

    def convert(self, model: Any, tensors: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        """`tensors` by pattern; the result by the model's names."""
        rule = copy.deepcopy(self.rule)
        for pattern, some in tensors.items():
            for name, tensor in zip(self.sources[pattern], some, strict=False):
                rule.add_tensor(self.target, name, pattern, tensor)
        converted = rule.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}

    @property
    def stacks_rows(self) -> bool:
        """Whether row i of the result is made of the i-th tensor of each pattern alone, as for experts."""
        first, *others = self.rule.operations
        return (
            type(first).__name__ == "MergeModulelist"
            and first.dim == 0
            and all(type(operation).__name__ == "Concatenate" and operation.dim > 0 for operation in others)
        )


@dataclass
class NamePlan:
    """Where each tensor of a model is in the files. A tied tensor has the first of its names."""

    plain: dict[str, list[str]] = field(default_factory=dict)
    """Model's name → names in the files; several only if the files hold a tied tensor more than once."""
    converted: dict[str, Conversion] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: dict[str, Shape] = field(default_factory=dict)
    """Model's name → its shape in the files."""


def plan_names(model: Any, files: Mapping[str, Shape]) -> NamePlan:
    """Maps the state dict of a meta model to tensors of the files, by name and shape."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    state = model.state_dict()
    first = first_names(model)
    plan = NamePlan()
    groups: dict[str, Conversion] = {}
    shapes: dict[str, Shape] = {}
    for key in sorted(files, key=dot_natural_key):  # expert 2 before expert 10
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if name not in state:
            plan.unexpected.append(key)
        elif pattern is None:
            plan.plain.setdefault(first[name], []).append(key)
            shapes[first[name]] = files[key]
        else:
            rule = next(converter for converter in converters if pattern in converter.source_patterns)
            group = groups.setdefault(name, Conversion(rule, name))
            group.sources.setdefault(pattern, []).append(key)
    for group in groups.values():
        meta = {
            pattern: [torch.empty(files[name], device="meta") for name in names]
            for pattern, names in group.sources.items()
        }
        for name, tensor in group.convert(model, meta).items():
            plan.converted[first.get(name, name)] = group
            shapes[first.get(name, name)] = tuple(tensor.shape)
    _compare(plan, model, shapes)
    return plan


def _compare(plan: NamePlan, model: Any, shapes: Mapping[str, Shape]) -> None:
    """Fills in what does not fit, without what the model's class declares as optional."""
    saved = model.state_dict()
    tensors = {
        name: tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()] if name in saved
    }
    plan.missing = [name for name in tensors if name not in shapes]
    keys = SimpleNamespace(missing_keys=set(), unexpected_keys=set(plan.unexpected))
    model._adjust_missing_and_unexpected_keys(keys)
    plan.unexpected = [name for name in plan.unexpected if name in keys.unexpected_keys]
    plan.misshapen = {
        name: shape
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    }


def saved_pieces(model: Any) -> dict[str, dict[str, Tensor]]:
    """Model's name → the tensors that save_pretrained makes of it, as meta tensors by name.

    A tied tensor is there once, under the name that transformers keeps. Where several tensors of the model
    are saved as one, all keep the model's names, which transformers reads too.
    """
    from transformers.core_model_loading import revert_weight_conversion

    state = _untied(model)
    together = revert_weight_conversion(model, dict(state))
    try:
        pieces = {name: reverted(model, name, tensor) for name, tensor in state.items()}
    except Exception:  # operations that need several tensors at once raise many classes
        pieces = {}
    names = {name: tuple(one.shape) for some in pieces.values() for name, one in some.items()}
    if names == {name: tuple(one.shape) for name, one in together.items()}:
        return pieces
    return {name: {name: tensor} for name, tensor in state.items()}


def reverted(model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """One tensor of the model as save_pretrained names and splits it."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, {name: tensor}))


def _untied(model: Any) -> dict[str, Tensor]:
    saved = model.state_dict()
    untied = {}
    for names in all_names(model).values():
        some = [name for name in names if name in saved]
        if some:
            name = next((one for one in some if one not in model.all_tied_weights_keys), some[0])
            untied[name] = saved[name]
    return {name: untied[name] for name in saved if name in untied}


# ---------------------------------------------------------------- random weights


def initialise(model: Any, path: str, unchanged: Collection[str]) -> None:
    """Calls transformers' initialisation of one module; the tensors of the state dict in `unchanged` stay."""
    from transformers import initialization

    tensors = [tensor for name, tensor in model.state_dict(keep_vars=True).items() if name in unchanged]
    for tensor in tensors:
        setattr(tensor, _FLAG, True)
    try:
        with initialization.guard_torch_init_functions():
            _owner(model, path)._init_weights(model.get_submodule(path))
    finally:
        for tensor in tensors:
            if hasattr(tensor, _FLAG):  # a tied one is there twice
                delattr(tensor, _FLAG)


def _owner(model: Any, path: str) -> Any:
    """The innermost transformers model around a module: it initialises that module."""
    from transformers import PreTrainedModel

    parts = path.split(".") if path else []
    around = (model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1))
    return next(module for module in around if isinstance(module, PreTrainedModel))


def draw_missing(build: Callable[[], nn.Module], name: str, seed: int) -> Tensor:
    """A tensor that the folder lacks, as transformers initialises it; a function of the seed and the name."""
    with torch.device("meta"):
        model: Any = build()
    path, _, key = name.rpartition(".")
    with _real(model, path, torch.zeros_like), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(name_seed(seed, name, 4))
        initialise(model, path, ())
        drawn: Tensor = getattr(model.get_submodule(path), key).detach()
    return drawn


@contextmanager
def _real(model: nn.Module, path: str, make: Callable[..., Tensor]) -> Iterator[list[str]]:
    """A module of a meta model has tensors on the host within this block."""
    module = model.get_submodule(path)
    on_meta = dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])
    for key, tensor in on_meta.items():
        real = make(tensor, device="cpu")
        setattr(module, key, nn.Parameter(real) if isinstance(tensor, nn.Parameter) else real)
    try:
        yield list(on_meta)
    finally:
        for key, tensor in on_meta.items():
            setattr(module, key, tensor)


class ModuleDraws(Mapping[str, Tensor]):
    """The state dict of a model that `build` makes; a tied tensor is drawn under the first of its names."""

    def __init__(self, build: Callable[[], nn.Module], seed: int) -> None:
        with torch.device("meta"):
            self._model: Any = build()
        self._seed = seed
        self._first = first_names(self._model)
        self._last: tuple[str | None, dict[str, Tensor]] = (None, {})

    def __getitem__(self, name: str) -> Tensor:
        path, _, key = self._first[name].rpartition(".")
        if self._last[0] != path:
            self._last = (None, {})  # freed before the next is drawn
            self._last = (path, self._drawn(path))
        tensor = self._last[1][key]
        if not _is_filled(tensor):
            raise ConfigError(
                f"transformers does not initialise {name} of {type(self._model).__name__}.",
                "--model.weights FILE, or a factory of your own that builds it: --model.name my_module:build",
            )
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._model.state_dict())

    def __len__(self) -> int:
        return len(self._model.state_dict())

    def _drawn(self, path: str) -> dict[str, Tensor]:
        parts = path.split(".") if path else []
        with _real(self._model, path, _unfilled) as keys, torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(name_seed(self._seed, path, 4))
            # Its own initialisation, then those of the modules around it, which may scale it again (GPT-2's
            # projections).
            for depth in range(len(parts), -1, -1):
                initialise(self._model, ".".join(parts[:depth]), ())
            module = self._model.get_submodule(path)
            return {key: getattr(module, key).detach() for key in keys}


def _unfilled(tensor: Tensor, *, device: str) -> Tensor:
    value = torch.nan if tensor.is_floating_point() else 0 if tensor.dtype == torch.bool else -77
    return torch.full_like(tensor, value, device=device, requires_grad=False)


def _is_filled(tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return not bool(tensor.isnan().any())
    return tensor.dtype != torch.bool and not bool((tensor == -77).any())


# ---------------------------------------------------------------- a hub id


def snapshot(path: str, files: Sequence[str] = (), commit: str = "") -> Path:
    """The folder of a hub id in the cache of huggingface_hub. One process downloads what it lacks, while the
    others wait: all but the weights, or `files` of a commit.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    with locked(cache_folder("hub") / f"{path.replace('/', '--')}.lock"):
        with suppress(FileNotFoundError):
            if not files:
                return Path(snapshot_download(path, local_files_only=True))
        if not log.isEnabledFor(logging.INFO):
            disable_progress_bars()  # rank 0 shows its own
        log.info("%s is downloaded into the cache of huggingface_hub", path)
        return Path(snapshot_download(path, revision=commit or None, allow_patterns=[*(files or NO_WEIGHTS)]))
