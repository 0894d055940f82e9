"""The loss of each source of a mixture: sums over its rows, which travel with the step's loss.

A step's numbers are the loss, the weight of a user's loss or what a model adds to its cross entropy, and
then the sources' losses and weights. They need no collective and no wait of their own. A model that returns
only its own loss has no loss for each row: its sources are left out, with one line in the log. Not here:
which row is from which source (fsdp/data/types.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp.data.types import Batch
from fsdp.models.cross_entropy import LossParts

NOT_KNOWN = (
    "the model returns its own loss and none for each row: losses of the sources of the mixture are left "
    "out. HINT: return the logits"
)


def numbers_of(found: LossParts, batch: Batch, sources: int) -> Tensor:
    """A micro-batch's numbers in float64: 0-d for a loss alone."""
    loss = found.loss_sum.detach().double()
    own = [one.detach().view(1).double() for one in (found.weight, found.auxiliary) if one is not None]
    own += sums_by_source(found, batch, sources)
    return torch.cat([loss.view(1), *own]) if own else loss


def sums_by_source(found: LossParts, batch: Batch, sources: int) -> list[Tensor]:
    """The sums of losses and of weights, a number for each source; empty if they are not known."""
    if found.rows is None or batch.sources is None:
        return []
    losses, weights = found.rows
    # A padded batch may have been cut. No product with 0: a loss that is not finite stays its source's.
    rows = batch.sources[: len(losses)] == torch.arange(sources, device=losses.device).view(-1, 1)
    counted = rows & batch.valid[: len(losses)]
    return [torch.where(counted, one.double(), 0).sum(1) for one in (losses, weights)]


@dataclass(frozen=True)
class SourceLosses:
    """A step's sums over all ranks, of one number a source each; may still be on the device."""

    labels: tuple[str, ...]
    sums: Tensor
    """Losses, then weights."""

    def named(self, numbers: list[float], unit: str, prefix: str = "loss") -> Mapping[str, float]:
        """The record's fields from the fetched sums. A source without a sample in the step has none."""
        half = len(self.labels)
        found: dict[str, float] = {}
        for label, loss, weight in zip(self.labels, numbers[:half], numbers[half:], strict=True):
            if weight:
                found |= {f"{prefix}/{label}": loss / weight, f"{unit}/{label}": weight}
        return found
