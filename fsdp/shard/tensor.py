"""--mesh.tensor: layers divided over tensor ranks by the plan that the model hands over, and the gradients of
what stays whole on each of them.

A plan maps names of modules, with `*` for numbers, to styles. Models of transformers have a `tp_plan`, and
transformers divides them; any other model has a method `tensor_plan()` with styles of `STYLES`, and torch
divides it. Applied to the plain meta model, before any other change: a plan breaks ties, which are made
again.

A parameter that no plan divides is whole on each tensor rank. Its gradient is either the same there, for all
compute the same from the same rows; or a part, where each rank applies it to heads of its own (`SUMMED`: the
norms of q and k). One all-reduce a step averages the former, so that kernels whose result varies let no
copies drift apart, and sums the latter. transformers' own style sums what is accumulated, at every
micro-batch: wrong from the second one on, and not applied. The first step checks that gradients are as the
plan says: some plans leave out a parameter that each rank applies to a part of its own, and train it wrong
without an error.

The logits of the output layer stay divided too, where the loss is their cross entropy: `DividedVocabulary`
sums over the classes of all tensor ranks. A loss that reads logits itself gets whole ones.

Not here: which part of a tensor a rank holds (fsdp/distributed/boxes.py), FSDP over what is left (shard.py).
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from fsdp.base.errors import ConfigError
from fsdp.distributed.boxes import local_tensor, whole_on_tensor
from fsdp.distributed.collectives import all_gather_objects
from fsdp.distributed.mesh import MeshSizes
from fsdp.models.loss import LossParts, flat_logits, row_sums
from fsdp.models.registry import IGNORED
from fsdp.models.transformer import Transformer
from fsdp.models.units import clean_name, names_by_tensor

STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": functools.partial(ColwiseParallel, output_layouts=Replicate()),
    "embedding_rowwise": functools.partial(RowwiseParallel, input_layouts=Replicate()),
}
"""torch's, under the names of transformers."""
GATHERED = "colwise_gather_output"
SUMMED = "replicated_with_grad_allreduce"
DIMS = {
    **dict.fromkeys(STYLES, 0),
    **dict.fromkeys(("rowwise", "rowwise_split_input", "embedding_colwise"), 1),
}
"""Styles that leave one contiguous part of a weight on a rank, and the dim that they divide."""
TOLERANCE = 1e-2
"""Of the gradients of copies: far above rounding, far below what a part of a sum differs by."""


def one_instead(sizes: MeshSizes) -> str:
    return f"--mesh.tensor 1 --mesh.shard {sizes.shard * sizes.tensor}"


def check_transformers(flag: str) -> None:
    """ConfigError before transformers 5.23, whose functions take plans in another form."""
    version = importlib.metadata.version("transformers")
    if tuple(map(int, version.split(".")[:2])) < (5, 23):
        fault = f"{flag} needs transformers 5.23, which divides its models; {version} is installed."
        raise ConfigError(fault, "pip install -U 'transformers>=5.23'")


def plan_of(model: nn.Module, sizes: MeshSizes) -> dict[str, str]:
    """The styles by the names of modules and parameters that the model has. ConfigError if the model has no
    plan, or one that cannot be followed, or sizes that tensor ranks do not divide. `model` is plain.
    """
    kind, flag = type(model).__name__, f"--mesh.tensor {sizes.tensor}"
    own: Any = getattr(model, "tensor_plan", None)
    rules: Mapping[str, str] = (own() if own else getattr(model, "tp_plan", None)) or {}
    experts = getattr(model, "ep_plan", None) if sizes.expert > 1 else None
    apart = tuple(f"{name}." for name in experts or ())
    known = {
        re.compile(re.escape(name).replace(r"\*", r"\d+")): style
        for name, style in rules.items()
        if not f"{name}.".startswith(apart)
    }

    def style_of(name: str) -> str | None:
        return next((style for rule, style in known.items() if rule.fullmatch(name)), None)

    plan: dict[str, str] = {}
    parameters = dict(model.named_parameters())
    for module_name, module in model.named_modules():
        style = style_of(module_name)
        for parameter_name, _ in module.named_parameters(recurse=False):
            name = f"{module_name}.{parameter_name}".removeprefix(".")
            if name in parameters and (own_style := style_of(name) or style):
                plan[name] = own_style
        if style:
            plan[module_name] = style
    if not plan:
        raise ConfigError(f"{flag}: {kind} has no plan that divides its layers.", one_instead(sizes))
    for name, style in plan.items():
        if style not in (*(STYLES if own else DIMS), SUMMED):
            hint = one_instead(sizes) + (f" --mesh.expert {sizes.tensor}" if "expert" in name else "")
            raise ConfigError(f"{flag}: {kind} divides {name} as {style}, which is not supported.", hint)
    if not own:
        check_transformers(flag)
    _check_dropout(model, sizes)
    _check_divided(model, plan, sizes)
    return plan


def _check_dropout(model: nn.Module, sizes: MeshSizes) -> None:
    """Masks within what is divided would be the same on all tensor ranks."""
    config: Any = getattr(model, "config", None)
    for name, value in (config.get_text_config().to_dict() if hasattr(config, "to_dict") else {}).items():
        inside = re.search(r"att.*drop|act.*drop|drop.*att", name)
        if inside and isinstance(value, float) and value > 0:
            raise ConfigError(
                f"--mesh.tensor {sizes.tensor} and {name} {value:g} of config.json do not go together: "
                "tensor ranks would drop the same of their heads.",
                f"--model.args.{name} 0, or {one_instead(sizes)}",
            )


def _check_divided(model: nn.Module, plan: Mapping[str, str], sizes: MeshSizes) -> None:
    """DTensor's arithmetic is not FSDP's where tensor ranks do not divide a dim, and heads are whole."""
    counts: dict[str, tuple[int, str]] = {}
    for name, parameter in model.named_parameters():
        style = plan.get(name, SUMMED)
        dim = DIMS.get(style)
        if dim is None or dim >= parameter.dim():
            continue
        layer = name.rpartition(".")[0]
        size: int = getattr(model.get_submodule(layer.rpartition(".")[0]), "head_dim", 0)
        heads = style == "colwise" and bool(size) and not parameter.shape[0] % size
        count = parameter.shape[dim] // (size if heads else 1)
        counts[name] = count, f"{count} heads" if heads else f"{'rows' if dim == 0 else 'columns'} {count}"
    fits = math.gcd(*(count for count, _ in counts.values()))
    for name, (count, text) in counts.items():
        if count % sizes.tensor:
            tensor = max(n for n in range(1, sizes.tensor) if not fits % n and not sizes.tensor % n)
            shard = sizes.shard * sizes.tensor // tensor
            raise ConfigError(
                f"--mesh.tensor {sizes.tensor} does not divide {name}, {text} ({sizes.equation}).",
                f"--mesh.tensor {tensor} --mesh.shard {shard}",
            )


def apply_plan(
    model: nn.Module, mesh: DeviceMesh, sizes: MeshSizes, *, reads_logits: bool
) -> tuple[frozenset[str], DividedVocabulary | None]:
    """Divides a plain meta model; returns the names of the parameters whose gradients are to be summed.
    `reads_logits`: a loss of the user gets the logits, whole.
    """
    plan = plan_of(model, sizes)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    names = names_by_tensor(model.named_parameters(remove_duplicate=False)).values()
    divided = {name: style for name, style in plan.items() if style != SUMMED}
    output, vocabulary = _output_layer(model), None
    if not reads_logits and output and divided.get(output) == GATHERED:
        divided[output], vocabulary = "colwise", DividedVocabulary(mesh.get_group())
    # the logits of all tensor ranks are a view; fsdp/shard/checks.py looks for what writes into one
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    if hasattr(model, "tensor_plan"):
        parallelize_module(model, mesh, {n: STYLES[style]() for n, style in divided.items() if n in modules})
    else:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        apply_tensor_parallelism(model, mesh, divided)
    for first, *others in names:
        for name in others:
            layer, _, attribute = name.rpartition(".")
            setattr(modules[layer], attribute, model.get_parameter(first))
    for name, module in modules.items():
        weights = [*module.parameters(recurse=False)]
        if any(not whole_on_tensor(p) for p in weights) is not bool(weights and name in divided):
            raise ConfigError(
                f"--mesh.tensor {sizes.tensor}: {type(model).__name__} divides a weight, and not {name}, "
                "which has the same one.",
                one_instead(sizes),
            )
    return frozenset(name for name in plan.keys() - divided.keys() if name in parameters), vocabulary


def _output_layer(model: nn.Module) -> str:
    """Its name, if the loss is the cross entropy of its output; else empty."""
    if type(model) is Transformer:  # a model made from it may do more with the logits
        return "head"
    from fsdp.models.hf import maybe_entropy

    hf: Any = model
    output = hf.get_output_embeddings() if maybe_entropy(model) is not None else None
    return next((name for name, module in model.named_modules() if module is output), "")


class DividedVocabulary:
    """The cross entropy of logits of which each tensor rank has some classes, in the ranks' order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, logits: Tensor, targets: Tensor, per_row: bool, z_loss: float) -> LossParts:
        """As fsdp.models.loss.cross_entropy_parts has it."""
        flat, wanted = flat_logits(logits), targets.reshape(-1)
        losses, normalizers = self.losses(flat, wanted)
        loss_sum = losses.sum()
        if z_loss:
            loss_sum = loss_sum + z_loss * normalizers.masked_fill(wanted == IGNORED, 0.0).square().sum()
        correct = None if torch.is_grad_enabled() else (self.predicted(flat) == wanted).sum()
        rows = (row_sums(losses.view(targets.shape)), row_sums(targets != IGNORED)) if per_row else None
        return LossParts(loss_sum, correct, rows=rows)

    def losses(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row of `logits`, [rows, classes of this rank]: the loss, 0 where the target is masked, and
        log Σ exp of all classes.
        """
        found: tuple[Tensor, Tensor] = _DividedEntropy.apply(logits, targets, self._group)
        return found

    def predicted(self, logits: Tensor) -> Tensor:
        """The first class with the largest of each row, as argmax has it."""
        own, indices = logits.max(-1)
        largest, rows = own.clone(), logits.shape[-1] * self._group.size()
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._group)
        indices = torch.where(own == largest, indices + self._group.rank() * logits.shape[-1], rows)
        dist.all_reduce(indices, dist.ReduceOp.MIN, self._group)
        return indices


class _DividedEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup
    ) -> Any:
        largest = logits.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        scores = logits - largest.unsqueeze(-1)
        indices = targets - group.rank() * scores.shape[-1]
        held = (indices >= 0) & (indices < scores.shape[-1]) & (targets != IGNORED)
        indices = torch.where(held, indices, 0).unsqueeze(-1)
        picked = scores.gather(-1, indices).squeeze(-1).masked_fill(~held, 0)
        sums = torch.stack([scores.exp_().sum(-1), picked])
        dist.all_reduce(sums, group=group)
        normalizers = sums[0].log()
        ctx.save_for_backward(scores.div_(sums[0].unsqueeze(-1)), indices, held, targets)
        losses = (normalizers - sums[1]).masked_fill(targets == IGNORED, 0)
        return losses, normalizers + largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_losses: Tensor, of_normalizers: Tensor) -> Any:  # type: ignore[override]
        shares, indices, held, targets = ctx.saved_tensors
        of_losses = of_losses.masked_fill(targets == IGNORED, 0)
        gradient = shares * (of_losses + of_normalizers).unsqueeze(-1)
        picked = of_losses.masked_fill(~held, 0).unsqueeze(-1)
        return gradient.scatter_add_(-1, indices, -picked), None, None


class TensorGradients:
    """Those of the trained parameters that are whole on each tensor rank."""

    def __init__(self, root: nn.Module, group: dist.ProcessGroup, summed: frozenset[str]) -> None:
        self._root, self._group, self._summed = root, group, summed
        self.checked = False
        """Whether a step has compared the gradients; the planner's have no values."""

    @functools.cached_property
    def _whole(self) -> list[tuple[str, nn.Parameter]]:
        # Read when the weights are real: leaving meta replaces each parameter.
        named = ((clean_name(name), p) for name, p in self._root.named_parameters())
        return [(name, p) for name, p in named if p.requires_grad and whole_on_tensor(p)]

    @torch.no_grad()
    def reduce(self) -> None:
        """After a step's last micro-batch. Collective."""
        held = [(name, local_tensor(p.grad)) for name, p in self._whole if p.grad is not None]
        if not held:
            return
        packed = torch.cat([gradient.reshape(-1) for _, gradient in held])
        dist.all_reduce(packed, group=self._group)
        parts = packed.split([gradient.numel() for _, gradient in held])
        if not self.checked:
            self._check(held, parts)
        for (name, gradient), part in zip(held, parts, strict=True):
            factor = 1 if name in self._summed else self._group.size()
            torch.div(part.view_as(gradient), factor, out=gradient)

    def _check(self, held: list[tuple[str, Tensor]], sums: tuple[Tensor, ...]) -> None:
        """The gradients of copies are the same, and those that are summed are not."""
        self.checked, size = True, self._group.size()
        numbers = [
            torch.stack([gradient.abs().max(), (gradient.reshape(-1) - total / size).abs().max()])
            for (_, gradient), total in zip(held, sums, strict=True)
            if gradient.numel()
        ]
        mine = iter(torch.stack(numbers).tolist() if numbers else [])
        table = {name: next(mine) for name, gradient in held if gradient.numel()}
        everyones = all_gather_objects(table)
        for name, _ in held:
            some = [t[name] for t in everyones if name in t]
            largest, difference = (max(column) for column in zip(*some, strict=True))
            wrong = (
                difference <= TOLERANCE * largest
                if name in self._summed
                else difference > TOLERANCE * largest
            )
            if wrong and largest > 0:
                how = "the same" if name in self._summed else "different"
                raise ConfigError(
                    f"--mesh.tensor {size}: tensor ranks have {how} gradients of {name}, "
                    "which the model's plan does not say: it would be trained wrong.",
                    "--mesh.tensor 1, or a plan of the model that names it",
                )
