"""The processes that train sharded: a world, mesh after mesh, by fsdp.run.loop.train itself.

Not here: the comparison of their exports (compare.py).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp.base.errors import ConfigError, TrainingError
from fsdp.parity.options import Comparison, ParityOptions, Row

if TYPE_CHECKING:
    from fsdp.dist.env import DistEnv

GROUP_TIMEOUT_S = 300.0
REASON = 900
"""Characters of a reason: what is written to a pipe at once, up to 4 KiB, no other rank interrupts."""


def sharded_rows(
    options: ParityOptions, tried: list[Row], folder: str, on_cuda: bool
) -> Generator[tuple[Row, str]]:
    """Each mesh as soon as it is done, with the reason if it is not possible. TrainingError if a rank fails.

    Ranks whose mesh is not possible wait for one another in its collectives: a new world trains the others.
    """
    left = list(tried)
    while left:
        with contextlib.closing(_world(options, list(left), folder, on_cuda)) as reasons:
            for reason in reasons:
                yield left.pop(0), reason
                if reason:
                    break


def _world(options: ParityOptions, tried: list[Row], folder: str, on_cuda: bool) -> Generator[str]:
    """One world's processes: an empty string for each mesh that has trained, or the reason why it cannot."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    members = [
        context.Process(target=_rank, args=(rank, options, tried, folder, on_cuda, theirs), daemon=True)
        for rank in range(options.ranks)
    ]
    for member in members:
        member.start()
    try:
        for _ in tried:
            ready = wait([ours, *(member.sentinel for member in members)])
            if ours not in ready:  # `theirs` is open here: a pipe that is ready has a message
                rank = next(rank for rank, member in enumerate(members) if member.sentinel in ready)
                raise TrainingError(f"rank {rank} failed: {_last_line(Path(folder, f'rank-{rank}.log'))}.")
            yield ours.recv()
    finally:
        for member in members:
            member.kill()
            member.join()


def run_of(folder: str, row: Row, training: Comparison) -> Path:
    return Path(folder, row.name, training.name.lower())


def train_rows(
    env: DistEnv, options: ParityOptions, tried: list[Row], folder: str, done: Callable[[], None]
) -> None:
    """One rank: fsdp.run.loop.train for each mesh and each kind of training."""
    import torch.distributed as dist

    from fsdp.run.loop import train

    for row in tried:
        for training in Comparison:
            run = run_of(folder, row, training)
            train(options.config(row, str(run), training), env)
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
        if env.is_main:
            done()
        dist.barrier()  # no rank reports the next mesh as not possible before rank 0 has reported this one


def _last_line(log: Path) -> str:
    lines = (
        [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if log.exists()
        else []
    )
    return lines[-1].strip().rstrip(".") if lines else "its log is empty"


def _rank(
    rank: int, options: ParityOptions, tried: list[Row], folder: str, on_cuda: bool, pipe: Connection
) -> None:
    log = os.open(Path(folder, f"rank-{rank}.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch
    import torch.distributed as dist

    from fsdp.dist.env import DistEnv, pick_device
    from fsdp.dist.process_group import process_group

    if not on_cuda:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // (options.ranks + 1)))
    env = DistEnv(
        rank=rank,
        world_size=options.ranks,
        local_rank=rank,
        local_world_size=options.ranks,
        node_rank=0,
        num_nodes=1,
        device=pick_device(rank, "cuda" if on_cuda else "cpu"),
        launcher="fsdp.parity",
    )
    meeting = dist.FileStore(str(Path(folder, f"store-{len(tried)}")), options.ranks)
    with process_group(env, GROUP_TIMEOUT_S, meeting):
        try:
            train_rows(env, options, tried, folder, lambda: pipe.send(""))
        except ConfigError as error:  # sent before the group is aborted, and other ranks fail for that
            pipe.send(str(error)[:REASON])
            raise
