"""The unsharded loop that every mesh is held against: one process, the whole model, torch's own optimizer, written out.

On purpose it shares with fsdp/loop.py only what says what is trained: the initial weights, the samples, lr_at, and how what a
model returns becomes a loss. torch is imported within: a wrong flag is said before it is loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdp.config import Config
from fsdp.parity.asked import Asked

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdp.job import Job


def train_plainly(asked: Asked, job: Job, device: Any) -> dict[str, Tensor]:
    """One process, the whole model, torch's own optimizer; the global batch cut in pieces only to fit in memory."""
    import torch

    from fsdp.checkpoint.full import open_full_state
    from fsdp.models import build_real
    from fsdp.optim import lr_at

    config = asked.config(None, "")
    model = build_real(job.spec, config.run.seed, device)
    if config.model.weights:
        model.load_state_dict(dict(open_full_state(config.model.weights)))
    kept, computed = (torch.float64,) * 2 if asked.dtype == "fp64" else (torch.float32, _lower(asked.dtype))
    model._apply(lambda tensor: tensor.to(kept) if tensor.is_floating_point() else tensor)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = _optimizer(config, trained)
    for step in range(asked.steps):
        indices = job.cursor.indices(step)
        whole = {name: value.to(device) for name, value in job.data.train.batch(indices).items()}
        optimizer.zero_grad()
        weight = max(1, int((whole["targets"] != -100).sum())) if _by_token(whole) else len(indices)
        for at in range(0, len(indices), job.batch.micro_batch):
            piece = {name: value[at : at + job.batch.micro_batch] for name, value in whole.items()}
            (_loss_sum(model, piece, computed) / weight).backward()
        if config.train.clip_grad_norm:
            torch.nn.utils.clip_grad_norm_(trained, config.train.clip_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(config.optim, step + 1, asked.steps)
        optimizer.step()
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def _by_token(batch: Mapping[str, Tensor]) -> bool:
    return "targets" in batch and batch["targets"].dim() > 1


def _lower(dtype: str) -> Any:
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]


def _loss_sum(model: nn.Module, batch: Mapping[str, Tensor], dtype: Any) -> Tensor:
    """Parameters are cast for the computation, their gradients are in the dtype they are kept in."""
    import torch
    import torch.nn.functional as F

    from fsdp.loss import loss_or_logits

    wanted = inspect.signature(model.forward).parameters
    more = any(p.kind is p.VAR_KEYWORD for p in wanted.values())
    cast = {n: v.to(dtype) if v.is_floating_point() else v for n, v in batch.items()}
    extra = {n: v for n, v in cast.items() if n != "inputs" and (n in wanted or (more and n != "targets"))}
    lower = {n: p.to(dtype) if p.dim() else p for n, p in model.named_parameters()}
    loss, logits = loss_or_logits(torch.func.functional_call(model, lower, (cast["inputs"],), extra))
    if loss is not None:
        return loss * len(batch["inputs"])
    assert logits is not None
    flat = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(flat.flatten(0, -2), batch["targets"].flatten(), ignore_index=-100, reduction="sum")


def _optimizer(config: Config, trained: list[Any]) -> Any:
    import torch

    section = config.optim
    decay = section.weight_decay if section.name == "adamw" else 0.0
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum)
    kind = torch.optim.AdamW if section.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=section.lr, betas=(section.beta1, section.beta2), eps=section.eps)
