"""Optimizer states in host memory between updates; parameters and gradients stay on the device.

The update goes part by part: a part's states are copied to the device, updated there by the optimizer's own
kernel, and copied back, so that one part of them is on the device and not the whole. The numbers are those of
an update on the device, to the bit: it is elementwise. On CUDA the host memory is pinned; the host waits for
the copies at the end of the update, so that a checkpoint reads whole states. On a CPU the same code copies
within host memory. Not here: states in files (nvme.py), parameters on the host too (--memory.cpu_offload).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from fsdp.base.torch_private.core import like_shard
from fsdp.config import MemorySection, OptimSection
from fsdp.config.sections import MOMENTS
from fsdp.dist.shards import local_tensor
from fsdp.parallel.state_parts import (
    moments_of,
    parts_of,
    preallocated_states,
    step_some,
    trained_parameters,
)

PART_BYTES = 256 << 20
"""Bytes of states on the device at once; one parameter is never cut."""

Rooms = dict[tuple[Tensor, str], Tensor]
"""Host memory by parameter and moment."""


def maybe_host_states(
    memory: MemorySection, optim: OptimSection, state_dtype: torch.dtype, device: torch.device
) -> HostStates | None:
    if not memory.optimizer_offload:
        return None
    kept = torch.bfloat16 if optim.state == "bf16" else state_dtype
    return HostStates(MOMENTS[optim.name], kept, device)


class HostStates:
    """States of one rank: a tensor in host memory for each moment of each parameter."""

    def __init__(self, moments: Iterable[str], dtype: torch.dtype, device: torch.device) -> None:
        self._moments, self._dtype, self._device = tuple(moments), dtype, device
        self.copied = 0
        """Bytes copied to the device so far."""

    @contextlib.contextmanager
    def preallocated(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Context in which a checkpoint is read: it fills states in host memory."""
        parameters = trained_parameters(optimizer)
        states = {p: {moment: self._room(p, self._dtype) for moment in self._moments} for p in parameters}
        try:
            with preallocated_states(optimizer, states):
                yield
        finally:
            kept: Rooms = {(p, name): room for p, moments in states.items() for name, room in moments.items()}
            self._to_host(optimizer, parameters, kept)
            self._wait()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's own step, part by part."""
        for part in parts_of(optimizer, self._dtype.itemsize * len(self._moments), PART_BYTES):
            rooms = self._to_device(optimizer, part)
            step_some(optimizer, part)
            self._to_host(optimizer, part, rooms)
        self._wait()

    @torch.no_grad()
    def _to_device(self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> Rooms:
        """Puts copies on the device in place of the states; returns the states in host memory."""
        rooms: Rooms = {}
        for parameter, name, value in moments_of(optimizer, parameters):
            rooms[parameter, name] = value
            local = local_tensor(value)
            moved = torch.empty_like(local, device=self._device).copy_(local, non_blocking=True)
            optimizer.state[parameter][name] = like_shard(parameter, moved)
            self.copied += moved.nbytes
        return rooms

    @torch.no_grad()
    def _to_host(
        self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], rooms: Rooms
    ) -> None:
        """Copies states back into their rooms; one that is new, or of another dtype, gets a room."""
        for parameter, name, value in moments_of(optimizer, parameters):
            room = rooms.get((parameter, name))
            if room is value:
                continue
            if room is None or room.dtype != value.dtype:
                room = self._room(parameter, value.dtype)
            local_tensor(room).copy_(local_tensor(value), non_blocking=True)
            optimizer.state[parameter][name] = room

    def _room(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Host memory for one moment, pinned if it is copied to CUDA."""
        pinned = self._device.type == "cuda"
        return like_shard(
            parameter, torch.empty(local_tensor(parameter).shape, dtype=dtype, pin_memory=pinned)
        )

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
