"""Out of memory: the error, how it is recognised, and the model and step that it is explained from.

Imported by every run; what is needed only once memory has run out is oom_report.py.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fsdp.base.errors import Scope, ShardrunError
from fsdp.base.phases import Phases
from fsdp.data.types import Samples
from fsdp.dist.mesh import BatchPlan, MeshSizes
from fsdp.models.loss import CustomLoss
from fsdp.parallel.shard import Dtypes

MESSAGES = (
    "can't allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "CUDA out of memory",
    "out of memory",
)
"""Parts of torch's error messages on the CPU, and where the class torch.OutOfMemoryError is lost."""


class OutOfMemory(ShardrunError):
    """Memory ran out on one rank; the page has the details."""

    exit_code = 6
    scope: Scope = "rank"


@dataclass(kw_only=True)
class OomContext:
    """The model and its step, filled in by the loop as they are built; None for what does not exist yet."""

    sizes: MeshSizes
    batch: BatchPlan
    dtypes: Dtypes
    build: Callable[[], nn.Module]
    """Builds the trained model on the meta device."""
    samples: Samples
    root: nn.Module
    units: Sequence[Sequence[nn.Module]]
    loss: CustomLoss | None = None
    optimizer: torch.optim.Optimizer | None = None
    phases: Phases | None = None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error or one of its causes is an out-of-memory error."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, ShardrunError):
            return False
        if isinstance(chain, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(chain, RuntimeError) and any(message in str(chain) for message in MESSAGES):
            return True
        if isinstance(chain, OSError) and chain.errno == errno.ENOMEM:
            return True
        chain = chain.__cause__ or chain.__context__
    return False
