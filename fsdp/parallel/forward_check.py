"""Checks of the first forward in training: what FSDP does not see there is lost, or ends the process.

A gathered parameter is a copy for one step. What a forward writes there (a momentum encoder that follows
another one, as MoCo's; weights that are clipped) is lost; an RNN's flatten_parameters on CUDA puts other
memory under it, which is never gathered into again.

A unit that is freed after its forward is gathered again when the gradient of its output arrives. No such
gradient is seen in an object that is no container, nor in a view that is written in place after the forward:
backward would read freed memory.

A unit that torch.func.functional_call calls with other weights gathers its own ones in their place.

Not here: buffers, which each rank keeps whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.base.torch_private.core import tree_leaves, viewed, writes
from fsdp.base.torch_private.fsdp import (
    frees_after_forward,
    is_written,
    parameter_groups,
    parameter_name,
    replaced_parameter,
    seen_tensors,
)
from fsdp.config import Config
from fsdp.models.units import blocks_of, clean_name
from fsdp.parallel.shard import Sharded, compiles

KEPT = "--mesh.reshard_after_forward false"
PLAIN = (Tensor, str, bytes, int, float, complex, type(None))


def check_first_forward(sharded: Sharded, config: Config, *, later_too: bool = False) -> None:
    """Called when the weights are real. Compiled modules are left out: a hook would break their graph.
    `later_too`: the caller of the model is a loop of one's own, which may replace weights in any forward.
    """
    if sharded.sizes.strategy == "ddp":
        return
    compiled: set[nn.Module] = set()
    if compiles(config.speed, sharded.device):
        compiled.update(blocks_of(sharded.units) or [sharded.root])
    views = _OutputViews()
    names = {module: clean_name(name) for name, module in sharded.root.named_modules()}
    for group in parameter_groups(sharded.root):
        for module in group.modules:
            if module not in compiled:
                # One's own gather may change the values.
                _FirstForward(module, names[module], group, views, gathers_own=bool(config.comm.all_gather))
                _Replaced(sharded.root, module, group, later_too=later_too)
    if sharded.root not in compiled:
        views.end_with(sharded.root)


def _in_training(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()


class _OutputViews:
    """Outputs of units that are views, until the end of the root's forward."""

    def __init__(self) -> None:
        self._found: list[tuple[str, Tensor, int]] = []

    def note(self, name: str, tensor: Tensor) -> None:
        if viewed(tensor) is not None:
            self._found.append((name, tensor, writes(tensor)))

    def end_with(self, root: nn.Module) -> None:
        self._handle = root.register_forward_hook(self, prepend=True)

    def __call__(self, module: nn.Module, inputs: object, output: object) -> None:
        if not _in_training(module):
            return
        self._handle.remove()
        found, self._found = self._found, []
        name = next((name for name, tensor, before in found if writes(tensor) != before), None)
        if name is not None:
            raise ConfigError(
                f"the output of {name} is a view, and the forward writes into it afterwards (x += y): "
                f"FSDP would not gather {name} for its backward.",
                f"x = x + y in place of x += y, or {KEPT}",
            )


class _FirstForward:
    """A forward hook that checks a module of a communication group once."""

    def __init__(
        self, module: nn.Module, name: str, group: Any, views: _OutputViews, *, gathers_own: bool
    ) -> None:
        self._name, self._group, self._views, self._gathers_own = name, group, views, gathers_own
        # Before FSDP's own hook, which frees the parameters.
        self._handle = module.register_forward_hook(self, prepend=True)

    def __call__(self, module: nn.Module, inputs: object, output: object) -> None:
        if not _in_training(module):
            return
        self._handle.remove()
        if not self._gathers_own:
            self._refuse_writes()
        if frees_after_forward(self._group):
            self._refuse_hidden(output)

    def _refuse_writes(self) -> None:
        written = next((one for one in self._group.fsdp_params if is_written(one)), None)
        if written is not None:
            raise ConfigError(
                f"the forward writes into {clean_name(parameter_name(written))}, which is gathered for this "
                "step alone: its shards do not change.",
                # A save copies parameters during the next forward.
                "register_buffer for what forward changes, or --mesh.strategy ddp --checkpoint.mode blocking",
                scope="rank",
            )

    def _refuse_hidden(self, output: object) -> None:
        seen = seen_tensors(output)
        for tensor in seen:
            self._views.note(self._name, tensor)
        hidden = next((one for one in tree_leaves(output) if not isinstance(one, PLAIN)), None)
        if hidden is not None and not seen:
            raise ConfigError(
                f"{self._name} returns a {type(hidden).__name__}, in which FSDP finds no tensors: it would "
                f"not gather {self._name} for its backward.",
                f"return tensors, or a tuple, list, dictionary or dataclass of them; or {KEPT}",
            )


class _Replaced:
    """A hook before a module's forward that refuses weights in the place of its communication group's."""

    def __init__(self, root: nn.Module, module: nn.Module, group: Any, *, later_too: bool) -> None:
        self._root, self._group, self._later_too = root, group, later_too
        # Before FSDP's own hook, which puts the gathered parameters there.
        self._handle = module.register_forward_pre_hook(self, prepend=True)

    def __call__(self, module: nn.Module, inputs: object) -> None:
        if torch.compiler.is_compiling():
            return
        if _in_training(module) and not self._later_too:
            self._handle.remove()
        replaced = replaced_parameter(self._group)
        if replaced is None:
            return
        name = next((name for name, one in self._root.named_parameters() if one is replaced), "a parameter")
        raise ConfigError(
            f"torch.func.functional_call replaces {clean_name(name)}, in whose place FSDP gathers the "
            "model's own: the weights that it is called with would be ignored.",
            "functional_call on a module inside of a unit, or --mesh.strategy ddp",
            scope="rank",
        )
