"""The processes that train sharded: one world, mesh after mesh, by fsdp.run.loop.train itself.

Not here: the comparison of their exports (compare.py).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp.base.errors import TrainingError
from fsdp.parity.options import Comparison, ParityOptions, Row

if TYPE_CHECKING:
    from fsdp.dist.env import DistEnv

GROUP_TIMEOUT_S = 300.0


@contextlib.contextmanager
def sharded_ranks(
    options: ParityOptions, tried: list[Row], folder: str, on_cuda: bool
) -> Iterator[Iterator[int]]:
    """Processes of one world; yields the index of each mesh when it is done, and raises if a rank fails."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    members = [
        context.Process(
            target=_rank, args=(rank, options, tried, folder, on_cuda, None if rank else theirs), daemon=True
        )
        for rank in range(options.ranks)
    ]
    for member in members:
        member.start()
    theirs.close()

    def done() -> Iterator[int]:
        left = {member.sentinel: rank for rank, member in enumerate(members)}
        for _ in tried:
            while ours not in (ready := wait([ours, *left])):
                for sentinel in ready:
                    _ended(left.pop(sentinel))  # type: ignore[arg-type]
            try:
                yield ours.recv()
            except EOFError:
                _ended(0)

    def _ended(rank: int) -> None:
        members[rank].join()
        if members[rank].exitcode:
            raise TrainingError(f"rank {rank} failed: {_last_line(Path(folder, f'rank-{rank}.log'))}.")

    try:
        yield done()
    finally:
        for member in members:
            if member.is_alive():
                member.kill()
            member.join()


def run_of(folder: str, at: int, training: Comparison) -> Path:
    return Path(folder, str(at), training.name.lower())


def train_rows(
    env: DistEnv, options: ParityOptions, tried: list[Row], folder: str, done: Callable[[int], None]
) -> None:
    """One rank: fsdp.run.loop.train for each mesh and each kind of training."""
    from fsdp.run.loop import train

    for at, row in enumerate(tried):
        for training in Comparison:
            run = run_of(folder, at, training)
            train(options.config(row, str(run), training), env)
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
        done(at)


def _last_line(log: Path) -> str:
    lines = (
        [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if log.exists()
        else []
    )
    return lines[-1].strip().rstrip(".") if lines else "its log is empty"


def _rank(
    rank: int, options: ParityOptions, tried: list[Row], folder: str, on_cuda: bool, pipe: Connection | None
) -> None:
    log = os.open(Path(folder, f"rank-{rank}.log"), os.O_CREAT | os.O_WRONLY)
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
    with process_group(env, GROUP_TIMEOUT_S, dist.FileStore(str(Path(folder, "store")), options.ranks)):
        train_rows(env, options, tried, folder, pipe.send if pipe is not None else lambda _: None)
