"""The keys of the model and of the optimizer in a checkpoint that another program wrote with `dcp.save`.

Programs nest them differently: {"model": …}, {"app": {"model": …, "optim": …}}, {"state_dict": {"module":
…}}. The model's prefix is the one that turns the name of every parameter into a key.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.checkpoint.metadata import Metadata

from fsdp.base.errors import CheckpointError
from fsdp.checkpoint.tensor_keys import Prefixes


def prefixes(metadata: Metadata, parameters: Iterable[str], where: str) -> Prefixes:
    """The prefixes of this checkpoint's keys, for a model with these parameters."""
    keys, names = set(metadata.state_dict_metadata), list(parameters)
    longest = max(names, key=len)
    candidates = {key.removesuffix(longest) for key in keys if key.endswith(longest)}
    fitting = sorted((p for p in candidates if all(p + name in keys for name in names)), key=len)
    if not fitting:
        example = min(keys, default="nothing")
        raise CheckpointError(
            f"{where} does not hold this model: no prefix turns {longest} and all other parameters into keys "
            f"(it holds {example}, …).",
            "give the flags of the model that it was saved from",
        )
    return Prefixes(fitting[0], _optimizer_prefix(keys, names))


def other_keys(
    metadata: Metadata, model_keys: Iterable[str], where: Prefixes
) -> tuple[str | None, list[str]]:
    """The key of the epoch beside the model, if there is one, and every other key that is not loaded."""
    parts = where.model.split(".")
    levels = [".".join([*parts[:depth], ""]) if depth else "" for depth in range(len(parts))]
    keys = set(metadata.state_dict_metadata)
    epoch = next((level + "epoch" for level in reversed(levels) if level + "epoch" in keys), None)
    left = keys - set(model_keys) - {epoch}
    if where.optim is not None:
        loaded = (f"{where.optim}state.", f"{where.optim}param_groups.")
        left = {key for key in left if not key.startswith(loaded)}
    return epoch, sorted(left)


def _optimizer_prefix(keys: set[str], names: list[str]) -> str | None:
    """The prefix before `state.<parameter>.<moment>`, if the checkpoint has such a key."""
    for name in names:
        for key in keys:
            head, middle, _ = key.rpartition(f"state.{name}.")
            if middle and (not head or head.endswith(".")):
                return head
    return None
