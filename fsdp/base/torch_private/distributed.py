"""Process groups, DDP's reducer, and the autograd engine: what their public interfaces leave out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel


def abort_all_groups() -> None:
    """Aborts all process groups, in the order that NCCL needs. ProcessGroup.abort is public, but the list of
    all groups is private. Without it, a rank that leaves after an error waits for the NCCL watchdog.
    """
    distributed_c10d._abort_process_group()


def all_groups() -> list[dist.ProcessGroup]:
    """The default group and all others of this process. The list of all groups is private.

    Whoever destroys groups holds them until their modules are freed. DDP's reducer frees its group while it
    holds Python's lock, and gloo's destructor then waits for a thread that needs the lock to free the tensor
    of its last collective: the process hangs. A group that Python frees last releases the lock first.
    """
    return list(distributed_c10d._world.pg_map)


def init_fake_group(rank: int, ranks: int) -> None:
    """A default process group whose collectives do nothing: the planner's. torch has it for its own tests
    alone.

    Without it, fsdp/plan cannot shard a model for another number of ranks.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())


def flight_recorder_entries() -> list[dict[str, Any]]:
    """The collectives in PyTorch's flight recorder, oldest first; empty if this torch has none.

    The generic recorder and, in torch 2.11 and 2.15, NCCL's own. NCCL's lists the ranks of each group: they
    are `group_ranks` of its entries. Without the recorder, a hang of NCCL has no verdict.
    """
    from torch._C import _distributed_c10d as c10d

    found: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            recorded = json.loads(dump(True, False))
            groups = recorded.get("pg_config", {})
            ranks = {group: about.get("ranks", "") for group, about in groups.items()}
            for entry in recorded.get("entries", []):
                found.append({**entry, "group_ranks": ranks.get(str(entry["process_group"][0]), "")})
    return found


def check_buckets_reduced(model: DistributedDataParallel) -> None:
    """RuntimeError if a bucket of DDP was not reduced in the last backward. Private since it is experimental.

    Without it, a parameter that the loss does not depend on makes the other ranks wait for the time-out.
    """
    model._check_reducer_finalized()


def at_end_of_backward(act: Callable[[], None]) -> None:
    """Called during a backward: queues `act` for when all gradients are computed.

    FSDP2 and DDP end their reductions in such callbacks; those of one backward run in the order of their
    queueing. Without it, the sum of the loss cannot overlap the end of a backward.
    """
    engine: Any = Variable._execution_engine
    engine.queue_callback(act)
