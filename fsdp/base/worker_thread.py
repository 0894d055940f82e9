"""A daemon thread that calls a method of its owner for each job of a queue, and ends with the owner.

A failed run does not stop this thread: its ranks may be gone. In a process that continues (a notebook, a
trial of Ray Tune) a thread with a reference to its owner would keep it, its buffers and its process group for
good.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from fsdp.base.devices import set_thread_device
from fsdp.base.weak_method import without_owner

Job = TypeVar("Job")


class WorkerThread(Generic[Job]):
    """`method` is bound to the owner. The thread's current device is `device`; `begin` is called there first,
    and does not refer to the owner.
    """

    def __init__(
        self,
        method: Callable[[Job], None],
        name: str,
        device: torch.device,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job] | None] = queue.SimpleQueue()
        owner = method.__self__  # type: ignore[attr-defined]
        weakref.finalize(owner, self._jobs.put, None).atexit = False
        arguments = (without_owner(method), self._jobs, device, begin)
        self._thread = threading.Thread(target=_serve, args=arguments, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        self._jobs.put((job,))

    def stop(self) -> None:
        """Waits for the jobs that were put before."""
        self._jobs.put(None)
        self._thread.join()


def _serve(
    act: Callable[[Job], None],
    jobs: queue.SimpleQueue[tuple[Job] | None],
    device: torch.device,
    begin: Callable[[], None],
) -> None:
    set_thread_device(device)
    begin()
    while (job := jobs.get()) is not None:
        act(*job)
        del job  # while it waits, the thread keeps nothing
