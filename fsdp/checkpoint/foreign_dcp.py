"""Checkpoints that `dcp.save` wrote elsewhere: which of their keys are the model's and which the optimizer's.

Programs nest them as they like ({"model": …}, {"app": {"model": …, "optim": …}}, {"state_dict": {"module":
…}}). The names of the parameters tell: the beginning that turns all of them into keys is the model's.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.checkpoint.metadata import Metadata

from fsdp.base.errors import CheckpointError
from fsdp.checkpoint.tensor_keys import Prefixes


def prefixes(metadata: Metadata, parameters: Iterable[str], where: str) -> Prefixes:
    """How the keys of this checkpoint begin, for a model with these parameters."""
    keys, wanted = set(metadata.state_dict_metadata), list(parameters)
    some = max(wanted, key=len)
    candidates = {key.removesuffix(some) for key in keys if key.endswith(some)}
    whole = sorted((p for p in candidates if all(p + name in keys for name in wanted)), key=len)
    if not whole:
        example = min(keys, default="nothing")
        raise CheckpointError(
            f"{where} does not hold this model: no key ends in {some} with all others beside it (it holds {example}, …).",
            "give the flags of the model that it was saved from",
        )
    return Prefixes(whole[0], _optimizer(keys, wanted))


def _optimizer(keys: set[str], wanted: list[str]) -> str | None:
    """The beginning before `state.<parameter>.<moment>`, where there is one for every parameter that has
    state at all.
    """
    for name in wanted:
        for key in keys:
            head, middle, _ = key.rpartition(f"state.{name}.")
            if middle and (not head or head.endswith(".")):
                return head
    return None
