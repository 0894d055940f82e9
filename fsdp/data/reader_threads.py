"""Threads that prepare steps k+1, k+2 … while step k computes. Not here: what they prepare.

Uses two C queues and a dict instead of an executor's futures: get() runs in every step, and a future costs
ten times as much.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from fsdp.base.devices import set_thread_device, thread_device
from fsdp.base.errors import ConfigError
from fsdp.base.phases import READER

T = TypeVar("T")


class Readers(Generic[T]):
    """get(k) returns make(k), or raises its error; `ahead` later ones are prepared. A jump discards them."""

    def __init__(self, make: Callable[[int], T], threads: int, *, ahead: int) -> None:
        self._make, self._ahead = make, ahead
        self._tasks: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._made: SimpleQueue[tuple[int, int, T | None, BaseException | None]] = SimpleQueue()
        self._ready: dict[int, tuple[T | None, BaseException | None]] = {}
        self._expected: int | None = None
        self._device = thread_device()  # the device to which the threads pin and copy
        self._jumps = 0  # numbers each sequence of consecutive steps: results of an earlier one are dropped
        # Daemons: a read that hangs does not keep the process from ending.
        self._threads: list[threading.Thread] = []
        for n in range(threads):
            self._start(threading.Thread(target=self._work, name=f"{READER}{n}", daemon=True), threads)

    def _start(self, thread: threading.Thread, wanted: int) -> None:
        try:
            thread.start()
        except RuntimeError as error:  # the system's limit
            started = len(self._threads)
            self.close()
            raise ConfigError(
                f"--data.workers {wanted}: this machine starts {started} threads more ({error}).",
                f"--data.workers {max(1, min(started // 2, 16))}",
            ) from None
        self._threads.append(thread)

    def get(self, step: int) -> T:
        if step == self._expected:
            self._tasks.put((self._jumps, step + self._ahead))
        else:
            self._jump(step)
        self._expected = step + 1
        while step not in self._ready:
            jumps, made, value, error = self._made.get()
            if jumps == self._jumps:
                self._ready[made] = (value, error)
        value, error = self._ready.pop(step)
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def _jump(self, step: int) -> None:
        self._jumps += 1
        self._ready.clear()
        for later in range(step, step + self._ahead + 1):
            self._tasks.put((self._jumps, later))

    def _work(self) -> None:
        set_thread_device(self._device)
        while (task := self._tasks.get()) is not None:
            jumps, step = task
            if jumps != self._jumps:
                continue
            try:
                self._made.put((jumps, step, self._make(step), None))
            except BaseException as error:
                self._made.put((jumps, step, None, error))

    def close(self) -> None:
        """Ends the threads, each after its current task."""
        self._jumps += 1
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._expected = None
