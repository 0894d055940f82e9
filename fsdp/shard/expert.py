"""--mesh.expert: whole experts on each rank, and the tokens that reach each of them.

transformers' `ep_plan` names the modules whose tokens are exchanged and their stacked parameters, which are
divided along the experts. Applied to the plain meta model, before checkpointing and compilation; the ranks
between which an expert's rows are divided then shard each of these modules by itself (shard.py). Expert ranks
read different rows, as data ranks do. Not here: which part of a tensor a rank holds (distributed/boxes.py).

The exchange stays outside of compiled graphs: each rank sends another number of rows in every forward.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp.base.errors import ConfigError
from fsdp.distributed.mesh import MeshSizes
from fsdp.models.units import has_separate_experts
from fsdp.shard.context import Exchange
from fsdp.shard.tensor import check_transformers

DISPATCHED, STACKED = "ep_dispatch_experts", "grouped_gemm"
"""Styles of transformers: of a module whose tokens are exchanged, and of its parameters."""


def dispatch_of(model: nn.Module, sizes: MeshSizes) -> dict[str, str]:
    """Styles by the names of the parameters of experts, each module's followed by its own. ConfigError if
    transformers has no such plan of the model, or the ranks do not divide the experts. `model` is plain.
    """
    kind, flag, hint = type(model).__name__, f"--mesh.expert {sizes.expert}", "--mesh.expert 1"
    if has_separate_experts(model):
        raise ConfigError(f"{flag}: {kind} has a module for each expert, and stacked ones are divided.", hint)
    rules: dict[str, str] = getattr(model, "ep_plan", None) or {}
    known = [(re.compile(re.escape(name).replace(r"\*", r"\d+")), style) for name, style in rules.items()]

    def style_of(name: str) -> str | None:
        return next((style for rule, style in known if rule.fullmatch(name)), None)

    plan: dict[str, str] = {}
    for module_name, module in model.named_modules():
        if style_of(module_name) != DISPATCHED:
            continue
        for name, parameter in module.named_parameters(module_name):
            plan[name] = style_of(name) or ""
            if plan[name] != STACKED:
                raise ConfigError(f"{flag}: {kind} has no plan that divides {name}.", hint)
            if (count := len(parameter)) % sizes.expert:
                fits = range(sizes.tensor, sizes.expert, sizes.tensor)
                most = max((n for n in fits if not count % n and not sizes.expert % n), default=1)
                fault = f"{flag} does not divide the {count} experts of {module_name} ({sizes.equation})."
                raise ConfigError(fault, f"--mesh.expert {most}")
        plan[module_name] = DISPATCHED
    if not plan:
        raise ConfigError(f"{flag}: {kind} has no plan of transformers that divides experts.", hint)
    check_transformers(flag)
    return plan


def apply_dispatch(
    model: nn.Module, sizes: MeshSizes, mesh: DeviceMesh, tensor: DeviceMesh | None
) -> ExpertModules:
    """Divides the experts of a plain meta model. `mesh` is the view "experts"; `tensor` that of the ranks
    which have the same tokens, None if each has its own.
    """
    plan, axis = dispatch_of(model, sizes), mesh["expert"]
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    modules = [model.get_submodule(name) for name, style in plan.items() if style == DISPATCHED]
    counts = [len(next(module.parameters())) for module in modules]
    alone: Any = SimpleNamespace(size=lambda: 1, get_group=axis.get_group)  # a rank's own mesh has no group
    apply_expert_parallelism(model, axis, tensor or alone, plan, "all_to_all")
    shards = tuple(name for name in mesh.mesh_dim_names or () if name != "expert")
    return ExpertModules(modules, counts, mesh[shards])


class ExpertModules:
    """The modules whose tokens are exchanged, and the tokens that the router gives to each expert."""

    FIELDS = ("expert_load", "experts_idle")
    """Of a step's record: the tokens of an expert over the mean of its layer, the largest of all; the number
    of experts without a token in the global batch.
    """

    def __init__(self, modules: Sequence[nn.Module], counts: Sequence[int], mesh: DeviceMesh) -> None:
        """`counts` are the experts of each module on all ranks; `mesh` is what shards them further."""
        self.modules, self.mesh = modules, mesh
        self._counts = counts
        self._tokens: dict[int, Tensor] = {}
        for layer, module in enumerate(modules):
            exchanged: Any = functools.partial(self._forward, layer, module.forward)
            module.forward = torch.compiler.disable(exchanged)

    def _forward(
        self, layer: int, forward: Callable[..., Tensor], hidden: Tensor, chosen: Tensor, weights: Tensor
    ) -> Tensor:
        # Set, not added to: recomputation counts the same tokens again.
        ids = chosen.detach().reshape(-1)
        tokens = torch.zeros(max(self._counts), dtype=torch.long, device=ids.device)
        self._tokens[layer] = tokens.scatter_add_(0, ids, torch.ones_like(ids))
        return forward(hidden, chosen, weights)

    def tokens(self) -> Tensor:
        """Of each expert in this rank's last forward, layer by layer."""
        layers = range(len(self.modules))
        return torch.cat([self._tokens.get(at, torch.zeros_like(self._tokens[0])) for at in layers]).double()

    def loads(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """A step's sums over all ranks without those of `tokens` at their end, and the numbers of FIELDS."""
        size = len(self.modules) * max(self._counts)
        rest, tokens = sums[:-size], sums[-size:].view(len(self.modules), -1)
        experts = torch.tensor(self._counts, dtype=tokens.dtype, device=tokens.device)
        load = (tokens.amax(1) * experts / tokens.sum(1).clamp(min=1)).max()
        idle = (tokens == 0).sum() - (tokens.shape[1] - experts).sum()
        return rest, torch.stack([load, idle])


def even_exchange() -> contextlib.AbstractContextManager[Any]:
    """Context for tensors without values, as a planner's: each rank sends as many tokens as any other."""
    from transformers.distributed.expert_parallel import AllToAllEP

    return mock.patch.object(AllToAllEP, "_dispatch_tokens", _dispatched_evenly)


def _dispatched_evenly(exchange: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Any:
    """As transformers' own, which reads from the device how many tokens come from each rank."""
    tokens, mesh, group = len(hidden), exchange.tp_mesh, exchange.ep_mesh.get_group()
    if mesh.size() > 1:
        whole = (
            DTensor.from_local(t, mesh, [Replicate()], run_check=False) for t in (hidden, chosen, weights)
        )
        hidden, chosen, weights = (t.redistribute(mesh, [Shard(0)]).to_local() for t in whole)
    order = torch.argsort(chosen.reshape(-1))
    sent = hidden[order // chosen.shape[-1]]
    sizes = [len(part) for part in sent.tensor_split(group.size())]
    rows: Tensor = Exchange.apply(sent, group)
    ids = torch.zeros(len(rows), 1, dtype=torch.long, device=rows.device)
    state = SimpleNamespace(
        top_k_weights=weights, order=order, send_sizes=sizes, recv_sizes=sizes, num_tokens=tokens
    )
    return rows, ids, torch.ones_like(ids, dtype=rows.dtype), state
