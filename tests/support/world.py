"""Real rank processes for tests: one pool, started once, from which each test takes n ranks.

    results = run_world(2, my_function, argument)  # my_function(env, argument) on each rank; results by rank

The function is at a module's top level and its result is picklable. A rank that raises fails the test with
its own traceback. A world that hangs is ended and the pool recreated, so that tests do not affect each other.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.env import env_of
from tests.support.forked import FORKED

if TYPE_CHECKING:  # the pool's own process does not need torch
    from torch.distributed import Store

DEFAULT_TIMEOUT_S = 120.0


class WorldError(AssertionError):
    """The errors of the ranks, the first failure first."""


class _Rank:
    def __init__(self) -> None:
        self.pipe, theirs = FORKED.Pipe()
        self.process = FORKED.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


_pool: list[_Rank] = []


def run_world(
    ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Any]:
    """Call function(env, *args) on `ranks` processes that form one gloo world; its results in rank order."""
    while len(_pool) < ranks:
        _pool.append(_Rank())
    with tempfile.TemporaryDirectory(prefix="world-") as folder:
        for rank in range(ranks):
            _pool[rank].pipe.send((function, args, rank, ranks, str(Path(folder, "store"))))
        return _collect(_pool[:ranks], function.__name__, timeout_s)


def _collect(members: list[_Rank], name: str, timeout_s: float) -> list[Any]:
    waiting = {member.pipe: rank for rank, member in enumerate(members)}
    results: list[Any] = [None] * len(members)
    failures: list[str] = []
    deadline = time.monotonic() + timeout_s
    while waiting:
        # After a first failure the others are stuck in collectives: they get a moment to speak, not the whole
        # time.
        ready = wait(list(waiting), timeout=5.0 if failures else max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            ok, value = _receive(pipe)
            if ok:
                results[rank] = value
            else:
                failures.append(f"rank {rank}: {value}")
    if waiting and not failures:
        failures.append(f"ranks {sorted(waiting.values())} did not answer within {timeout_s:.0f} s")
    if failures:
        end_pool()
        raise WorldError(f"{name} on {len(members)} ranks:\n" + "\n".join(failures))
    return results


def _receive(pipe: Connection) -> tuple[bool, Any]:
    try:
        ok, value = pipe.recv()
        return bool(ok), value
    except EOFError:
        return False, "the process ended"


def end_pool() -> None:
    while _pool:
        _pool.pop().end()


atexit.register(end_pool)


def _serve(pipe: Connection) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from fsdp.base.torch_private import all_groups, forget_meshes

    torch.set_num_threads(1)
    while True:
        try:
            function, args, rank, ranks, store = pipe.recv()
        except EOFError:
            return
        answer: tuple[bool, Any]
        before = set(threading.enumerate())
        meeting = dist.FileStore(store, ranks)
        try:
            dist.init_process_group(
                "cpu:gloo", store=meeting, rank=rank, world_size=ranks, timeout=timedelta(seconds=90)
            )
            # A rank that ends at once would close connections that another still waits to have: those of this
            # group, and of groups that the function makes, after which torch has no barrier of its own.
            _meet(meeting, "connected", rank, ranks)
            with _as_before():
                answer = True, function(env_of(rank, ranks), *args)
            _meet(meeting, "done", rank, ranks)
        except BaseException:
            answer = False, traceback.format_exc()
            meeting.set(f"done {rank}", "")  # the others end in their own ways
        finally:
            groups = all_groups()
            if dist.is_initialized():
                dist.destroy_process_group()
                forget_meshes()
            called = function.__name__
            # FSDP2's modules are cycles, and keep their groups: each gloo group has a thread that wakes 100
            # times a second. Without this a third of the tests' processor time went to 700 such threads.
            function = args = None
            gc.collect()
            del groups, meeting
        if answer[0] and (left := _threads_left(before)):
            answer = False, f"{called} has left threads in this process: {', '.join(left)}"
        try:
            pipe.send(answer)
        except Exception:  # what cannot be pickled
            pipe.send((False, traceback.format_exc()))
        del answer


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """Restores what a function, or a run in it, sets for the whole process, or the next test depends on the
    order of the tests: --watch.deterministic stays set in torch, a folder of caches in the environment.
    """
    import torch

    environ, folder = dict(os.environ), Path.cwd()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    try:
        yield
    finally:
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in environ.items() if os.environ.get(name) != value})
        os.chdir(folder)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)
        if exact := sys.modules.get("tests.models.exact_hf"):
            exact.narrowed()


def _meet(store: Store, word: str, rank: int, ranks: int) -> None:
    store.set(f"{word} {rank}", "")
    store.wait([f"{word} {other}" for other in range(ranks)])


def _threads_left(before: set[threading.Thread]) -> list[str]:
    """Names of new threads of the product that do not end, such as those of a run that was not closed.

    Libraries keep some for good: fsspec's, tqdm's, multiprocessing's that sends tensors.
    """
    deadline = time.monotonic() + 10
    while True:
        new = [one for one in threading.enumerate() if one not in before]
        left = [one.name for one in new if _is_ours(one)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)
        gc.collect()  # what a thread that has ended meanwhile kept


def _is_ours(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    return str(getattr(target, "__module__", "")).startswith(("fsdp.", "launch."))
