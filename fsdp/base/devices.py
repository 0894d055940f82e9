"""Devices and what is on them: figures of devices, digests and dtypes of tensors, threads with a device.

Figures of peak bf16 and memory bandwidth are those of NVIDIA's data sheets of the A100, H100, H200, B200, L4,
L40S, GH200, GB200 and B300, AMD's of the MI300X and MI250X, with sparsity halved. Not here: measured figures.

The digest of a tensor is independent of its sharding: Σ bitsᵢ·(2i+1) mod 2⁶⁴ over its elements in their
global order. A shard keeps two sums, Σ bits and Σ bits·(2j+1) with its own j from 0; a shard that starts at
element s adds 2s·Σ bits. So the sums of any sharding give the same digest, and equal shards on two ranks have
equal sums. It detects accidents (a flipped bit, mixed or swapped values), not an adversary.

A failed run does not stop a thread of a queue: its ranks may be gone. In a process that continues (a
notebook, a trial of Ray Tune) a thread with a reference to its owner would keep it, its buffers and its
process group for good.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

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


def memory_of(device: torch.device) -> float:
    """Bytes of its memory; of a CPU the machine's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


# ---------------------------------------------------------------- digests and dtypes of tensors

CHUNK = 1 << 18
_WORD = 2**64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class ShardDigest:
    """The two sums of one contiguous piece."""

    numel: int
    plain: int
    weighted: int

    def at(self, start: int) -> int:
        """Its part of the whole tensor's digest; `start` is the global index of its first element."""
        return (self.weighted + 2 * start * self.plain) % _WORD


def digest_shard(tensor: torch.Tensor) -> ShardDigest:
    """The sums of a local tensor, in chunks: the extra memory is a few MB at any size.

    They stay on its device, where int64 wraps modulo 2⁶⁴: the host waits for a device once a tensor.
    """
    flat = as_bits(tensor)
    plain, weighted = (torch.zeros((), dtype=torch.int64, device=flat.device) for _ in range(2))
    positions = torch.arange(1, 2 * CHUNK, 2, dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), CHUNK):
        bits = flat[start : start + CHUNK].to(torch.int64)
        total = bits.sum()
        plain += total
        weighted += (bits * positions[: bits.numel()]).sum() + 2 * start * total
    sums = torch.stack([plain, weighted]).tolist()
    return ShardDigest(flat.numel(), sums[0] % _WORD, sums[1] % _WORD)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Flat, as whole numbers of its elements' size."""
    flat = tensor.detach().contiguous()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    return flat.view(-1).view(_BITS[flat.element_size()]) if flat.numel() else flat.view(-1).to(torch.int64)


def same_values(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both hold the same numbers; a NaN is the same as one of the same bits."""
    alike = tensor.shape == other.shape and tensor.dtype == other.dtype
    if alike and torch.equal(as_bits(tensor), as_bits(other)):
        return True
    # 0 and -0, or of two dtypes; torch compares no numbers of 8 bits
    return tensor.element_size() > 1 and torch.equal(tensor, other)


def as_int64(word: int) -> int:
    """A word of 64 bits as torch.int64 holds it."""
    return (word + _WORD // 2) % _WORD - _WORD // 2


def combine(parts: list[int]) -> int:
    """The whole tensor's digest from its pieces' `at` values, in any order."""
    return sum(parts) % _WORD


DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Of --precision and --checkpoint.export_dtype."""


def widest_floating(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The widest floating-point one; float32 if there is none."""
    floating = (dtype for dtype in dtypes if dtype.is_floating_point)
    return max(floating, key=lambda dtype: dtype.itemsize, default=torch.float32)


# ---------------------------------------------------------------- threads


def set_thread_device(device: torch.device | None) -> None:
    """Make a CUDA device the calling thread's current device; does nothing for a CPU or None.

    The current device is a thread's own and starts at 0: a thread that pins, copies or records an event
    without this opens a context of about half a gigabyte on GPU 0. Every thread started here that touches
    tensors calls this first.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)


def thread_device() -> torch.device | None:
    """The calling thread's current CUDA device, for a thread that it starts; None if CUDA is not in use."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None


T = TypeVar("T")


def without_owner(method: Callable[[T], None]) -> Callable[[T], None]:
    """The bound method without a reference to its object; it does nothing when the object is gone.

    The garbage collector does not see hooks of tensors: an object that they keep, and that keeps the
    parameters, would stay for good, and with it their mesh. A thread that runs keeps what it refers to.
    """
    reference = weakref.WeakMethod(method)

    def call(argument: T) -> None:
        if (alive := reference()) is not None:
            alive(argument)

    return call


class WorkerThread(Generic[T]):
    """`method` is bound to the owner. The thread's current device is `device`; `begin` is called there first,
    and does not refer to the owner.
    """

    def __init__(
        self,
        method: Callable[[T], None],
        name: str,
        device: torch.device,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        jobs = self._jobs = queue.SimpleQueue[tuple[T] | None]()
        act = without_owner(method)
        weakref.finalize(method.__self__, jobs.put, None).atexit = False  # type: ignore[attr-defined]

        def serve() -> None:
            set_thread_device(device)
            begin()
            while (job := jobs.get()) is not None:
                act(*job)
                del job  # while it waits, the thread keeps nothing

        self._thread = threading.Thread(target=serve, name=name, daemon=True)
        self._thread.start()

    def put(self, job: T) -> None:
        self._jobs.put((job,))

    def stop(self) -> None:
        """Waits for the jobs that were put before."""
        self._jobs.put(None)
        self._thread.join()
