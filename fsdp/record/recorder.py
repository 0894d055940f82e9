"""Writes a run's numbers to metrics.jsonl, TensorBoard, other sinks, the console and the launcher's Reporter.

Rank 0 writes files; every rank reports, every time. On CUDA the numbers of a step stay on the device until a
line is printed. A file or a sink that fails (a full disk, an error in a user's sink) loses records;
the run continues.
"""

from __future__ import annotations

import functools
import itertools
import math
import resource
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fsdp.base.text import byte_size
from fsdp.dist.env import DistEnv
from fsdp.record.console import Console
from fsdp.record.sinks import Losses, Reporter, Sink
from fsdp.rundir.history import Appender, save_record
from fsdp.rundir.paths import RunDir

ASYNCHRONOUS_DEVICES = ("cuda",)
"""Devices on which fetching a number waits for all work queued before it."""


@dataclass(frozen=True)
class Pending:
    """A step whose loss and gradient norm may still be on the device."""

    record: Mapping[str, float]
    """What the host knows: step, lr, samples, tokens, step_time_s, data_wait_s."""
    loss: Tensor
    grad_norm: Tensor
    epoch: float | None = None
    """Epochs complete after this step; None for a stream."""
    began: float = 0.0
    """time.perf_counter() at its start."""
    more: Tensor | None = None
    """Further numbers on the device, fetched with the loss."""
    named: Callable[[list[float]], Mapping[str, float]] | None = None
    """From the fetched `more` to fields of the record."""


def peak_memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts it in KiB


def _read(tensors: list[Tensor]) -> list[list[float]]:
    """Their numbers, in one copy from the device."""
    numbers = iter(torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors]).tolist())
    return [list(itertools.islice(numbers, tensor.numel())) for tensor in tensors]


class Recorder:
    """One run's numbers on one rank. `mfu_of` is the MFU of one sample a second; 0 where the device's peak is
    not known.
    """

    def __init__(
        self,
        run: RunDir,
        env: DistEnv,
        reporter: Reporter,
        console: Console,
        *,
        from_step: int,
        mfu_of: float = 0.0,
    ) -> None:
        self._env, self._reporter, self._console, self._mfu_of = env, reporter, console, mfu_of
        self._metrics, self._saves = Appender(run.metrics), Appender(run.saves)
        self._sinks: list[tuple[Sink, Losses]] = []
        if env.is_main:
            self.add(EventWriter(run.path / "tensorboard", purge_step=from_step + 1))
        self._pending: list[Pending] = []
        self._asynchronous = env.device.type in ASYNCHRONOUS_DEVICES
        self.last: Mapping[str, float] = {}
        """The record of the last step that was fetched."""
        self.checkpoint_note = ""

    def add(self, sink: Sink, label: str = "") -> None:
        """It is closed with the recorder. `label` names it in the log."""
        self._sinks.append((sink, Losses(label or type(sink).__name__)))

    def step(self, pending: Pending) -> None:
        self._pending.append(pending)

    def fetches(self, step: int) -> bool:
        """Whether this step's numbers are fetched from the device now."""
        return not self._asynchronous or self._console.prints(step)

    def flush(self) -> None:
        """Fetch the pending steps, write them, and print them."""
        for record in self._fetch():
            step = int(record["step"])
            if self._env.is_main:
                self._metrics.append(record)  # unbuffered: a kill loses nothing that was printed
                self._send(step, "train", record)
                self._console.step(record, self.checkpoint_note)
            self._reporter.report(record)
            self.last = record

    def _fetch(self) -> list[dict[str, float]]:
        """The records in full precision. The host runs ahead of a CUDA device: its time per step differs from
        the device's, but the mean since the last fetch does not.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return []
        # Loss and norm may be on two devices.
        losses = _read([p.loss if p.more is None else torch.cat([p.loss.view(1), p.more]) for p in pending])
        norms = _read([p.grad_norm for p in pending])
        mean_s, memory = None, peak_memory_gib(self._env.device)
        if self._asynchronous and pending[0].began:
            mean_s = (time.perf_counter() - pending[0].began) / len(pending)
        records = []
        for p, (loss, *more), (norm,) in zip(pending, losses, norms, strict=True):
            record = {"step": p.record["step"], "loss": loss, "grad_norm": norm, **p.record}
            if mean_s is not None:
                record["step_time_s"] = mean_s
            duration = max(record["step_time_s"], 1e-9)
            record |= {"per_s": (record["tokens"] or record["samples"]) / duration, "max_mem_gib": memory}
            record |= _epoch(p.epoch)
            record |= {} if p.named is None else p.named(more)
            if self._mfu_of:
                record["mfu"] = self._mfu_of * record["samples"] / duration
            records.append(record)
        return records

    def evaluation(self, step: int, values: Mapping[str, float], epoch: float | None) -> None:
        """Record an evaluation; a value with "/" in its name is of one source, and is not printed."""
        record = {"step": step, **values, **_epoch(epoch)}
        if self._env.is_main:
            self._metrics.append(record)
            self._send(step, "eval", record)
            shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items() if "/" not in name)
            epochs = "" if epoch is None else f", epoch {epoch:.2f}"
            self._console.print_line(f"{shown}  at step {step}{epochs}")
        self._reporter.report(record)

    def saving(self, step: int) -> None:
        self.checkpoint_note = f"saving {step}"

    def saved(
        self, step: int, path: str, *, stall_s: float = 0.0, write_s: float = 0.0, size: int = 0
    ) -> None:
        """Record a sealed checkpoint: the seconds that it stalled the steps, and those of its write."""
        self.checkpoint_note = ""
        if self._env.is_main:
            self._saves.append(save_record(step, stall_s, write_s, size))
            self._console.print_line(
                f"checkpoint of step {step} sealed: {byte_size(size)} in {write_s:.2f} s"
            )
        self._reporter.report({"step": step}, checkpoint=path)

    def _send(self, step: int, group: str, record: Mapping[str, float]) -> None:
        values = {f"{group}/{name}": float(value) for name, value in record.items() if name != "step"}
        for sink, losses in self._sinks:
            try:
                sink.scalars(step, dict(values))
            except Exception as error:  # a full disk, a server that is away, an error in a user's sink
                losses.add(step, error)
            else:
                if losses.count:
                    losses.end(step)

    def close(self) -> None:
        Console.clear_live()
        self._metrics.close()
        self._saves.close()
        for sink, losses in self._sinks:
            try:
                if callable(close := getattr(sink, "close", None)):
                    close()
            except Exception as error:
                losses.not_closed(error)


def _epoch(epoch: float | None) -> dict[str, float]:
    """As a field of a record; a stream has none."""
    return {} if epoch is None else {"epoch": epoch}


# ---------------------------------------------------------------- TensorBoard
#
# Event files without the tensorboard package, whose import takes more than a second. The format: records of
# length, masked CRC-32C of the length, payload, masked CRC-32C of the payload. The payload is a protobuf
# Event message, of which four fields are used; a scalar event has 40 bytes.

BUFFER_BYTES = 8192


@functools.cache
def _crc_table() -> list[int]:
    table = []
    for row in range(256):
        for _ in range(8):
            row = (row >> 1) ^ (0x82F63B78 if row & 1 else 0)
        table.append(row)
    return table


def _masked_crc(data: bytes) -> int:
    crc, table = 0xFFFFFFFF, _crc_table()
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _event(wall_time: float, body: bytes) -> bytes:
    return _varint(1 << 3 | 1) + struct.pack("<d", wall_time) + body


@functools.cache
def _tag(tag: str) -> bytes:
    """A scalar up to its value: the tag's field and the value's first byte."""
    name = _bytes_field(1, tag.encode()) + _varint(2 << 3 | 5)
    return _varint(1 << 3 | 2) + _varint(len(name) + 4) + name


def _scalar(tag: str, value: float) -> bytes:
    try:
        return _tag(tag) + struct.pack("<f", value)
    except OverflowError:  # more than fp32 holds, as of a run that diverges
        return _tag(tag) + struct.pack("<f", math.copysign(math.inf, value))


class EventWriter:
    """Appends scalars to one new event file; a restart adds another file, as TensorBoard expects.

    Events are written whole or not at all: TensorBoard stops reading at a broken one.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        """TensorBoard discards the steps of earlier files from `purge_step` on (a resume after a crash)."""
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        self._file = Appender(folder / name, lines=False, buffer_bytes=BUFFER_BYTES)
        self._write(_event(time.time(), _bytes_field(3, b"brain.Event:2")))
        if purge_step is not None:
            session_log = _bytes_field(7, _varint(1 << 3) + _varint(1))  # SessionLog.START
            self._write(_event(time.time(), _varint(2 << 3) + _varint(purge_step) + session_log))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        summary = b"".join(_scalar(tag, value) for tag, value in values.items())
        self._write(_event(time.time(), _varint(2 << 3) + _varint(step) + _bytes_field(5, summary)))

    def _write(self, payload: bytes) -> None:
        length = struct.pack("<Q", len(payload))
        self._file.write(
            length
            + struct.pack("<I", _masked_crc(length))
            + payload
            + struct.pack("<I", _masked_crc(payload))
        )

    def close(self) -> None:
        self._file.close()
