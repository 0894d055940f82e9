"""Tensors kept in files between uses: the optimizer's states, and with `all` the sharded parameters and
gradients too.

They are ordinary tensors whose memory is a mapped file: kernels, checkpoints and digests read them as any
other. A file is unlinked as soon as it is open, so however a run ends, kill -9 included, the kernel frees the
space. Pages are loaded when they are touched and dropped on `forget`; what was written is in the file then.
The update goes part by part, and a part's pages leave the process as soon as it is done, so that one part is
resident and not the whole. The numbers are those of an update in memory, to the bit: it is elementwise.

Not here: gathered parameters, activations, and gradients before their reduction, which belong to a unit.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp.base.devices import without_owner
from fsdp.base.errors import ConfigError
from fsdp.base.text import byte_size
from fsdp.base.torch_private import like_shard, move_padded_shard, padded_shard, parameter_groups
from fsdp.config import MemorySection, OptimSection
from fsdp.distributed import collectives
from fsdp.distributed.boxes import local_tensor, rows_of, shard_count, tensors_in
from fsdp.shard.offload import PartedStates, cut_into_parts

log = logging.getLogger(__name__)

ALIGN = 64  # as torch aligns what it allocates


class MappedFile:
    """`size` bytes of disk as memory, allocated from front to back."""

    def __init__(self, folder: Path, size: int) -> None:
        self.size = max(size, mmap.PAGESIZE)
        descriptor = _open_nameless(folder)
        try:
            # Blocks are allocated now: a disk that fills up later would end the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, self.size)
            self._memory = mmap.mmap(descriptor, self.size)
        finally:
            os.close(descriptor)
        self._base: int = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
        self._next = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next piece, zeroed; its storage is its own, which FSDP compares by address."""
        numel = torch.Size(shape).numel()
        start, self._next = self._next, self._next + room_for(numel * dtype.itemsize)
        assert self._next <= self.size, f"{self._next} bytes of a file of {self.size}"
        if not numel:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=start).view(torch.Size(shape))

    def restart(self) -> None:
        """Allocates from the front again: earlier pieces are no longer used."""
        self._next = 0

    def holds(self, tensor: Tensor) -> bool:
        return bool(tensor.numel()) and self._base <= tensor.data_ptr() < self._base + self.size

    def forget(self, tensor: Tensor) -> None:
        """Drops the tensor's pages from this process; a touch loads them again. Neighbours in the
        outermost pages only fault again.
        """
        self._advise(tensor, mmap.MADV_DONTNEED)

    def fetch(self, tensor: Tensor) -> None:
        """Starts loading its pages ahead of their use."""
        self._advise(tensor, mmap.MADV_WILLNEED)

    def _advise(self, tensor: Tensor, advice: int) -> None:
        first = tensor.data_ptr() - self._base
        start = first // mmap.PAGESIZE * mmap.PAGESIZE
        self._memory.madvise(advice, start, first + tensor.nbytes - start)


def room_for(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _open_nameless(folder: Path) -> int:
    path = folder / f".shardrun-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    path.unlink()
    return descriptor


def reserve(folder: Path, sizes: Mapping[str, int]) -> list[MappedFile]:
    """A file of each size on every rank, or one ConfigError on all of them and nothing left behind.
    Collective.
    """
    files: list[MappedFile] = []
    host, trouble = socket.gethostname(), ""
    everyones = collectives.all_gather_objects((host, sum(sizes.values())))
    needed = sum(size for other, size in everyones if other == host)
    shown = ", ".join(f"{name} {byte_size(size)}" for name, size in sizes.items())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Before the first is allocated: that would fill the disk for others.
        if needed > (free := shutil.disk_usage(folder).free):
            trouble = (
                f"has {byte_size(free)} free on {host}, whose ranks put {byte_size(needed)} there ({shown})"
            )
        else:
            files = [MappedFile(folder, size) for size in sizes.values()]
    except OSError as error:
        trouble = f"has no room on {host} for {shown} ({error.strerror or error})"
    troubles = collectives.all_gather_objects(trouble)
    if any(troubles):
        files.clear()
        rank = next(rank for rank, text in enumerate(troubles) if text)
        raise ConfigError(
            f"--memory.nvme_dir {folder} of rank {rank} {troubles[rank]}.",
            "--memory.nvme_dir DIR, a folder on a larger local disk",
        )
    return files


PART_BYTES = 64 << 20
"""Bytes of states in a part: resident at once, and updated by one call of the optimizer."""
RETURNED_BYTES = 1 << 20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
FRAME = 16384  # more than head, tail and alignment of a tensor in a checkpoint's file


class NvmeFiles(PartedStates):
    """One rank's files. The constructor is collective: all ranks have room, or all raise."""

    def __init__(
        self,
        memory: MemorySection,
        optim: OptimSection,
        root: nn.Module,
        units: Sequence[Sequence[nn.Module]],
        *,
        state_dtype: torch.dtype,
    ) -> None:
        """The model may be on meta."""
        super().__init__(optim, state_dtype)
        free_at_once()
        self._root, self._units, self._everything = root, units, memory.nvme == "all"
        sizes = self._sizes(root)
        files = reserve(Path(memory.nvme_dir), sizes)
        self._files: dict[str, MappedFile] = dict(zip(sizes, files, strict=True))

    def _sizes(self, root: nn.Module) -> dict[str, int]:
        """Bytes by purpose; `staging` is a checkpoint's copy of the rank's file, which would otherwise be
        in memory.
        """
        kept = {name: _local(p) for name, p in root.named_parameters()}
        trained = [_local(p) for p in root.parameters() if p.requires_grad]
        states = sum(room_for(part.numel() * self._dtype.itemsize) for part in trained) * len(self._moments)
        tensors = [*kept.values(), *(b for b in root.buffers())]
        framed = sum(t.nbytes + FRAME for t in tensors) + states + 3 * FRAME * (len(trained) + 64)
        sizes = {"states": states, "staging": framed}
        if self._everything:
            # Padded to the first rank's rows, as FSDP gathers them; those with fewer are laid twice.
            padded = [
                room_for(_padded(p).numel() * p.element_size())
                for p in root.parameters()
                if isinstance(p, DTensor)
            ]
            sizes |= {"parameters": 2 * sum(padded), "gradients": sum(padded)}
        return sizes

    # ------------------------------------------------------------ parameters

    def empty(self, tensor: Tensor, device: torch.device | str) -> Tensor:
        """torch.empty_like for a meta model that becomes real: a shard's memory is in a file."""
        if not (self._everything and isinstance(tensor, DTensor)):
            return torch.empty_like(tensor, device=device)
        room = self._files["parameters"].take(_padded(tensor).shape, tensor.dtype)
        return like_shard(tensor, room[: _local(tensor).shape[0]])

    def settle_weights(self) -> None:
        """After the weights are allocated: a shard that FSDP has padded in memory moves to a file again."""
        for group in parameter_groups(self._root) if self._everything else ():
            for parameter in group.fsdp_params:
                data = padded_shard(parameter)
                if data.numel() and not self._files["parameters"].holds(data):
                    move_padded_shard(parameter, self._copied)

    def _copied(self, data: Tensor) -> Tensor:
        return self._files["parameters"].take(data.shape, data.dtype).copy_(data)

    def watch(self) -> None:
        """Called when the weights are real. A unit's shards are read as it is gathered and may be dropped
        after its forward and its backward; a gradient goes into its file as soon as it is reduced.
        """
        if not self._everything:
            return
        self.forget(self._root.parameters())
        held = [[p for module in unit for p in module.parameters()] for unit in self._units]
        for at, unit in enumerate(self._units):
            unit[-1].register_forward_hook(_Leave(self, held[at], held[at + 1] if at + 1 < len(held) else []))
        for parameter in self._root.parameters():
            if parameter.requires_grad and isinstance(parameter, DTensor):
                parameter.register_post_accumulate_grad_hook(without_owner(self._keep_gradient))

    @torch.no_grad()
    def _keep_gradient(self, parameter: nn.Parameter) -> None:
        assert isinstance(parameter.grad, DTensor)
        local = _local(parameter.grad)
        room = self.room(parameter, "grad", local.dtype)
        if local.numel() and local.data_ptr() != _local(room).data_ptr():
            _local(room).copy_(local)
            parameter.grad = like_shard(parameter.grad, _local(room))
        self.forget([room])

    # ------------------------------------------------------------ optimizer

    @property
    def part_bytes(self) -> int:
        return PART_BYTES

    def memory(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return self._files["gradients" if name == "grad" else "states"].take(shape, dtype)

    def bring(self, optimizer: torch.optim.Optimizer, part: list[Any], later: list[Any]) -> None:
        """The disk loads the next part meanwhile."""
        for parameter in later:
            self._fetch([parameter, parameter.grad, *optimizer.state.get(parameter, {}).values()])

    def put_back(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        super().put_back(optimizer, parameters)
        for parameter in parameters:
            self.forget([parameter, parameter.grad, *optimizer.state.get(parameter, {}).values()])

    # ------------------------------------------------------------ what is resident

    def in_turn(self, tensors: list[Tensor]) -> Iterator[list[Tensor]]:
        """Yields local tensors a few at a time; pages of the previous ones are dropped at the next."""
        for part in cut_into_parts([(t, t.nbytes) for t in tensors], PART_BYTES):
            yield part
            self.forget(part)

    def forget(self, tensors: Iterable[Any]) -> None:
        for file, local in self._held(tensors):
            file.forget(local)

    def _fetch(self, tensors: Iterable[Any]) -> None:
        for file, local in self._held(tensors):
            file.fetch(local)

    def _held(self, tensors: Iterable[Any]) -> Iterator[tuple[MappedFile, Tensor]]:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                local = _local(tensor)
                yield from ((file, local) for file in self._files.values() if file.holds(local))

    def take(self, size: int) -> Tensor:
        """Bytes for a checkpoint's copy: the largest possible one was reserved."""
        self._files["staging"].restart()
        return self._files["staging"].take((size,), torch.uint8)


def free_at_once() -> None:
    """Has glibc return freed blocks from a MiB on at once. It keeps those of up to 32 MiB for later:
    layers as large as that left several times their size behind (measured: 2,545 MiB where 344 were in
    use).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc's alone
        mallopt(M_MMAP_THRESHOLD, RETURNED_BYTES)
        mallopt(M_TRIM_THRESHOLD, RETURNED_BYTES)


class _Leave:
    """A unit's forward hook: drops its shards; when its output's gradient arrives, the next unit's
    backward is over.
    """

    def __init__(self, nvme_files: NvmeFiles, own: Sequence[Tensor], later: Sequence[Tensor]) -> None:
        self._nvme_files, self._own, self._later = nvme_files, own, later

    def __call__(self, module: nn.Module, inputs: object, output: object) -> None:
        self._nvme_files.forget(self._own)
        first = next((t for t in tensors_in(output) if t.requires_grad), None)
        if first is not None:
            first.register_hook(lambda grad: self._nvme_files.forget(self._later))


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach()


def _padded(shard: Tensor) -> Tensor:
    """A meta tensor as large as every rank's piece is in a gather."""
    rows = len(rows_of(shard.shape[0], 0, shard_count(shard)))
    return torch.empty((rows, *shard.shape[1:]), device="meta", dtype=shard.dtype)
