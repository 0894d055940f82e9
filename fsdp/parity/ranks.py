"""The processes that train sharded: one world, mesh after mesh, by fsdp.loop.train itself.

Not here: what is made of their exports (compare.py).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path

from fsdp.errors import TrainingError
from fsdp.parity.asked import Asked, Row

GROUP_TIMEOUT_S = 300.0


@contextlib.contextmanager
def sharded_ranks(asked: Asked, tried: list[Row], folder: str, on_cuda: bool) -> Iterator[Callable[[], None]]:
    """Processes that form one world; what is yielded waits for their end, and raises what the first of them met."""
    context = multiprocessing.get_context("spawn")
    members = [
        context.Process(target=_rank, args=(rank, asked, tried, folder, on_cuda), daemon=True) for rank in range(asked.ranks)
    ]
    for member in members:
        member.start()

    def finish() -> None:
        left = {member.sentinel: rank for rank, member in enumerate(members)}
        while left:
            for sentinel in wait(list(left)):
                rank = left.pop(sentinel)  # type: ignore[arg-type]
                members[rank].join()
                if members[rank].exitcode:
                    raise TrainingError(f"rank {rank} failed: {_last_words(Path(folder, f'rank-{rank}.log'))}.")

    try:
        yield finish
    finally:
        for member in members:
            if member.is_alive():
                member.kill()
            member.join()


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return lines[-1].strip().rstrip(".") if lines else "it said nothing"


def _rank(rank: int, asked: Asked, tried: list[Row], folder: str, on_cuda: bool) -> None:
    """One rank: the whole of fsdp.loop.train, mesh after mesh."""
    log = os.open(Path(folder, f"rank-{rank}.log"), os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch
    import torch.distributed as dist

    from fsdp.env import DistEnv, process_group
    from fsdp.loop import train

    if not on_cuda:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // (asked.ranks + 1)))
    env = DistEnv(
        rank=rank, world_size=asked.ranks, local_rank=rank, local_world_size=asked.ranks, node_rank=0, num_nodes=1,
        device=torch.device("cuda", rank) if on_cuda else torch.device("cpu"), launcher="fsdp.parity",
    )  # fmt: skip
    with process_group(env, GROUP_TIMEOUT_S, dist.FileStore(str(Path(folder, "store")), asked.ranks)):
        for at, row in enumerate(tried):
            train(asked.config(row, str(Path(folder, str(at)))), env)
            shutil.rmtree(Path(folder, str(at), "checkpoints"), ignore_errors=True)
