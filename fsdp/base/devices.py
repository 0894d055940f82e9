"""Figures of devices (peak bf16, memory bandwidth), a thread's current device, a thread for an object's jobs.

Sources: NVIDIA's data sheets of the A100, H100, H200, B200, L4, L40S, GH200, GB200 and B300, AMD's
of the MI300X and MI250X, figures with sparsity halved. A failed run does not stop a thread of a queue: its
ranks may be gone. In a process that continues (a notebook, a trial of Ray Tune) a thread with a reference to
its owner would keep it, its buffers and its process group for good. Not here: measured figures.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Device:
    """Dense bf16 in 10¹² operations a second, bandwidth of the memory in 10⁹ bytes a second."""

    name: str
    bf16_tflops: float
    memory_gb_s: float
    driver_words: str
    """Words of torch.cuda.get_device_name(): a name is that of the first device whose words all appear."""


DEVICES = (
    Device("A100 40GB", 312.0, 1555.0, "A100 40GB"),
    Device("A100 80GB", 312.0, 2039.0, "A100"),
    Device("H100 PCIe", 756.0, 2000.0, "H100 PCIE"),
    Device("H100 NVL", 835.0, 3900.0, "H100 NVL"),
    Device("H100 SXM", 989.4, 3350.0, "H100"),
    Device("GH200", 989.4, 4000.0, "GH200"),  # before H200, whose name is in it
    Device("H200", 989.4, 4800.0, "H200"),
    Device("GB200", 2500.0, 8000.0, "GB200"),
    Device("B200", 2250.0, 8000.0, "B200"),
    Device("B300", 2250.0, 8000.0, "B300"),
    Device("MI300X", 1307.4, 5300.0, "MI300X"),
    Device("MI250X GCD", 191.5, 1638.0, "MI250X"),  # half of the card: a process has one of its two
    Device("L40S", 362.0, 864.0, "L40S"),
    Device("L4", 121.0, 300.0, "L4"),
)


def find(name: str, *, typed: bool = False) -> Device | None:
    """The device with this driver name or short name; None if the table does not have it, or if it is a slice
    of one (MIG). `typed` by a person, whose h100x is a mistake and no device of that family.
    """
    parts = name.upper().replace("-", " ").replace("_", " ").split()

    def has(word: str) -> bool:
        return word in parts or (not typed and len(word) > 2 and any(word in part for part in parts))

    if "MIG" in parts:
        return None
    return next((device for device in DEVICES if all(map(has, device.driver_words.split()))), None)


def set_thread_device(device: torch.device | None) -> None:
    """Make a CUDA device the calling thread's current device; does nothing for a CPU or None.

    The current device is a thread's own and starts at 0: a thread that pins, copies or records an event
    without this opens a context of about half a gigabyte on GPU 0. Every thread started here that touches
    tensors calls this first.
    """
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.set_device(device)


def thread_device() -> torch.device | None:
    """The calling thread's current CUDA device, for a thread that it starts; None if CUDA is not in use."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    return torch.device("cuda", torch.cuda.current_device())


T = TypeVar("T")


def without_owner(method: Callable[[T], None]) -> Callable[[T], None]:
    """The bound method without a reference to its object; it does nothing when the object is gone.

    The garbage collector does not see hooks of tensors: an object that they keep, and that keeps the
    parameters, would stay for good, and with it their mesh. A thread that runs keeps what it refers to.
    """
    found = weakref.WeakMethod(method)

    def call(argument: T) -> None:
        if (alive := found()) is not None:
            alive(argument)

    return call


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
