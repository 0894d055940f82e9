"""Both sides started at once, and how far apart their parameters end.

Not here: what either side does (plain.py, ranks.py), or from which difference on it is one (asked.py).
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp.errors import ConfigError
from fsdp.parity.asked import Asked, Row, rows
from fsdp.parity.plain import train_plainly
from fsdp.parity.ranks import sharded_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from fsdp.job import Job


def compare(asked: Asked) -> dict[Row, float]:
    """Each mesh's difference from the plain loop. The ranks train while the plain loop does."""
    import torch

    from fsdp.job import prepare

    on_cuda = torch.cuda.is_available() and torch.cuda.device_count() >= asked.ranks
    device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
    # More threads than free cores wait for one another in each product: minutes instead of seconds.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // (asked.ranks + 1)))
    tried = rows(asked.ranks)
    for row in tried:
        job = prepare(asked.config(row, ""), world_size=asked.ranks, num_nodes=1, device=device)
    _refuse_chance(job)
    with tempfile.TemporaryDirectory(prefix="parity-") as folder, sharded_ranks(asked, tried, folder, on_cuda) as finish:
        plain = train_plainly(asked, job, device)
        finish()
        whole = [
            torch.load(Path(folder, str(at), "full_model", "full-model.pt"), weights_only=True) for at in range(len(tried))
        ]
        return {row: difference(found, plain, each=asked.dtype == "fp64") for row, found in zip(tried, whole, strict=True)}


def difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], *, each: bool) -> float:
    """‖a - b‖ / ‖b‖ of the worst parameter, or of all of them together; a number that is none is infinitely far."""
    squares = [
        (float((ours[n].double() - b.double()).square().sum()), float(b.double().square().sum())) for n, b in theirs.items()
    ]
    pairs = squares if each else [(sum(apart for apart, _ in squares), sum(size for _, size in squares))]
    found = [math.sqrt(apart / max(size, 1e-60)) if math.isfinite(apart) else math.inf for apart, size in pairs]
    return max(found, default=0.0)


def _refuse_chance(job: Job) -> None:
    """Where chance or the company of other rows decides, no two splits of a batch give the same numbers."""
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.dropout import _DropoutNd

    from fsdp.job import meta_model

    for name, module in meta_model(job.spec).named_modules():
        if (isinstance(module, _DropoutNd) and module.p) or (isinstance(module, nn.MultiheadAttention) and module.dropout):
            raise ConfigError(f"{name} drops values at random: runs cannot be compared.", "--model.args.dropout 0.0")
        if isinstance(module, _BatchNorm):
            raise ConfigError(
                f"{name} normalises over the rows that a rank has: runs cannot be compared.", "a model without BatchNorm"
            )
