"""Writes a run's numbers to metrics.jsonl, TensorBoard, other sinks, the console and the launcher's Reporter.

Rank 0 writes files; every rank reports, every time. On CUDA the numbers of a step stay on the device until a
line is printed. A file, a sink or a stream that fails (a full disk, a closed pipe, an error in a user's sink)
loses records; the run continues.

A log's lines have at most 132 columns at fixed positions, so that they can be compared; the live line of a
terminal shows as many fields as its width holds, the most important first, and other lines are printed above
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import logging
import math
import os
import resource
import shutil
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TextIO

import torch
from torch import Tensor

from fsdp.base.text import PrintableFormatter, byte_size, markdown, prepare_streams
from fsdp.distributed.env import DistEnv
from fsdp.rundir.history import Appender, RunDir, save_record

log = logging.getLogger(__name__)

ASYNCHRONOUS_DEVICES = ("cuda",)
"""Devices on which fetching a number waits for all work queued before it."""
LOG_COLUMNS = 132
IMPORTANCE = (
    "step",
    "loss",
    "rate",
    "left",
    "memory",
    "mfu",
    "percent",
    "saved",
    "epoch",
    "grad",
    "lr",
    "padding",
)
"""The most important field first."""
WAIT_SHOWN = 0.1
"""From this part of the time on, the wait for data is shown instead of memory: --data.workers reduces it."""
ERASE = "\r\x1b[2K"


class Reporter:
    """Where a launcher receives a run's numbers; this one takes none. Called on every rank."""

    def report(self, metrics: Mapping[str, float], checkpoint: str | None = None) -> None:
        """After each logged step, each evaluation and each sealed checkpoint."""

    def should_stop(self) -> str | None:
        """The launcher's reason to stop (a preemption notice), if any. Called once a step; must not block."""
        return None


class Sink(Protocol):
    """An output that receives every number of rank 0; it may have methods close() and texts() too.

    texts(step, values) receives rows of texts: the answers to held-out questions.
    """

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...


class Losses:
    """Consecutive lost records of one sink, which the log names by `label`. The run continues."""

    def __init__(self, label: str) -> None:
        self._label, self.count = label, 0

    def add(self, step: int, reason: object, count: int = 1) -> None:
        if not self.count:
            log.warning("step %d: %s cannot write: %s. The run continues", step, self._label, _line(reason))
        self.count += count

    def end(self, step: int) -> None:
        if self.count:
            log.warning("step %d: %s writes again, %d records are lost", step, self._label, self.count)
        self.count = 0

    def not_closed(self, error: Exception) -> None:
        log.warning("%s cannot be closed: %s. %d records are lost", self._label, _line(error), self.count)


def _line(reason: object) -> object:
    """An exception with its file and line: it may be one of a user's code."""
    from fsdp.models.registry import blame

    return blame(reason) if isinstance(reason, Exception) else reason


# ---------------------------------------------------------------- lines on streams


def set_up_logging(env: DistEnv) -> None:
    """Rank 0 logs from INFO, other ranks from WARNING, with their rank as prefix."""
    prepare_streams()
    root = logging.getLogger("fsdp")
    for handler in list(root.handlers):
        root.removeHandler(handler)
    handler = _LiveHandler(sys.stderr)
    prefix = "" if env.is_main else f"[rank {env.rank}] "
    handler.setFormatter(PrintableFormatter(f"{prefix}%(message)s"))
    root.addHandler(handler)
    root.propagate = False
    root.setLevel(logging.INFO if env.is_main else logging.WARNING)


class _LiveHandler(logging.StreamHandler[TextIO]):
    """Prints a log line above the live line."""

    def emit(self, record: logging.LogRecord) -> None:
        with Console.above_live():
            super().emit(record)


class Console:
    """Progress of one run: a plain line every `every` steps, or a live line at most ten times a second."""

    _live: Console | None = None

    def __init__(self, *, total_steps: int, every: int, unit: str, stream: TextIO | None = None) -> None:
        self._out = stream or sys.stdout
        self._terminal = self._out.isatty() and os.environ.get("TERM") != "dumb"
        self._total, self._every, self._unit = total_steps, every, unit
        self._live_line, self._drawn_at = "", 0.0
        self._failed = False
        self._started: tuple[int, float] | None = None
        self._steps: list[Mapping[str, float]] = []
        """Since the last line. Their means are shown: the last step of an epoch may be a short one."""

    def prints(self, step: int) -> bool:
        """Whether this step is printed, so that its numbers must be fetched from the device."""
        return step % self._every == 0 or step == self._total

    def step(self, record: Mapping[str, float], checkpoint: str) -> None:
        step, now = int(record["step"]), time.monotonic()
        self._started = self._started or (step - 1, now - record["step_time_s"])
        self._steps.append(record)
        if self._terminal and (now - self._drawn_at > 0.1 or step == self._total):
            # The last column stays free: a terminal wraps a full line, which could then not be overwritten.
            columns = shutil.get_terminal_size((80, 24)).columns - 1
            self._live_line = fit(self._fields(step, record, checkpoint), columns)
            self._write(ERASE + self._live_line)
            self._drawn_at, Console._live = now, self
        elif not self._terminal and self.prints(step):  # a log has a separate line for each save
            self._write(fit(self._fields(step, record, ""), LOG_COLUMNS).rstrip() + "\n")

    def _fields(self, step: int, record: Mapping[str, float], checkpoint: str) -> dict[str, str]:
        assert self._started is not None
        duration, work, waited, mfu, shown = 1e-9, 0.0, 0.0, 0.0, ""
        for earlier in self._steps:
            duration += earlier["step_time_s"]
            work += earlier["tokens"] or earlier["samples"]
            waited += earlier["data_wait_s"]
            mfu += earlier.get("mfu", 0.0) * earlier["step_time_s"]
        self._steps = []
        rate, positions = work / duration, record.get("positions_per_s", 0.0)
        for value in (rate, positions) if positions > rate else (rate,):
            power = 2 if value >= 1e6 else value >= 1e4
            shown += "/" if shown else ""
            shown += f"{value / 1e3**power:{'.3g' if power else '.0f'}}{['', 'k', 'M'][power]}"
        left = (time.monotonic() - self._started[1]) / max(1, step - self._started[0]) * (self._total - step)
        return {
            "step": f"step {step:>{len(str(self._total))}}/{self._total}",
            "percent": f"{step * 100 // max(1, self._total):>3}%" if self._terminal else "",
            "loss": f"loss {record['loss']:<6.4f}",
            "epoch": f"ep {record['epoch']:>5.2f}" if "epoch" in record else "",
            "grad": f"grad {record['grad_norm']:<6.3g}",
            "lr": f"lr {record['lr']:.1e}",
            "rate": f"{shown:>{10 if '/' in shown else 4}} {self._unit}/s",
            "mfu": f"{mfu / duration:>3.0%} MFU" if "mfu" in record else "",
            "memory": f"data {waited / duration:>3.0%}"
            if waited >= WAIT_SHOWN * duration
            else f"{record['max_mem_gib']:>4.1f} GiB",
            "padding": f"{record['padding']:.0%} padding" if "padding" in record else "",
            "left": f"{datetime.timedelta(seconds=math.ceil(left))} left",
            "saved": checkpoint,
        }

    @classmethod
    def clear_live(cls) -> None:
        """End the live line: what follows is printed below it."""
        if cls._live is not None:
            live, cls._live = cls._live, None
            live._write("\n")

    @classmethod
    @contextlib.contextmanager
    def above_live(cls) -> Iterator[None]:
        """Around printing a line: it takes the live line's place, which is drawn again below it."""
        live = cls._live
        if live is not None:
            live._write(ERASE)
        yield
        if live is not None:
            live._write(live._live_line)

    def print_line(self, text: str) -> None:
        with self.above_live():
            self._write(text + "\n")

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except OSError as error:
            if not self._failed:
                self._failed = True
                log.warning("the steps' lines cannot be printed (%s): the run continues", error.strerror)


def fit(fields: Mapping[str, str], columns: int) -> str:
    """As many fields as `columns` hold, in their fixed order: the least important ones are left out."""
    line = ""
    for count in range(len(IMPORTANCE), 0, -1):
        line = ""
        for name, text in fields.items():
            if text and name in IMPORTANCE[:count]:
                line += f"  {text}" if line else text
        if len(line) <= columns:
            break
    return line[: max(0, columns)]


# ---------------------------------------------------------------- records


class Pending(NamedTuple):
    """A step whose numbers may still be on the device."""

    record: Mapping[str, float]
    """What the host knows: step, lr, samples, tokens, step_time_s, data_wait_s; epoch, but of a stream."""
    numbers: Tensor
    """The loss, then the numbers that `named` reads."""
    grad_norm: Tensor
    began: float = 0.0
    """time.perf_counter() at its start."""
    named: Callable[[list[float]], Mapping[str, float]] | None = None
    """From the fetched numbers after the loss to fields of the record."""


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
        positions: int = 0,
    ) -> None:
        """`positions` of a sample, where not all of their tokens are trained on."""
        self._env, self._console, self._mfu_of, self._positions = env, console, mfu_of, positions
        # the base class takes nothing
        self._reporter = None if type(reporter) is Reporter else reporter
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

    def step(self, pending: Pending) -> bool:
        """Whether the numbers of the steps until this one were fetched from the device."""
        self._pending.append(pending)
        fetches = not self._asynchronous or self._console.prints(int(pending.record["step"]))
        if fetches:
            self.flush()
        return fetches

    def flush(self) -> None:
        """Fetch the pending steps, write them in full precision, and print them. The host runs ahead of a
        CUDA device: its time per step differs from the device's, but the mean since the last fetch does not.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return
        numbers, norms, device = [], [], self._env.device
        for step in pending:
            numbers.append(step.numbers.detach().double().reshape(-1))
            norms.append(step.grad_norm.detach().double())
        # One copy from each device: loss and norm may be on two.
        fetched, fetched_norms = torch.cat(numbers).tolist(), torch.stack(norms).tolist()
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(device) / 2**30
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts it in KiB
        mean_s = None
        if self._asynchronous and pending[0].began:
            mean_s = (time.perf_counter() - pending[0].began) / len(pending)
        for step, norm in zip(pending, fetched_norms, strict=True):
            (loss, *more), fetched = fetched[: step.numbers.numel()], fetched[step.numbers.numel() :]
            record = {"step": step.record["step"], "loss": loss, "grad_norm": norm, **step.record}
            if mean_s is not None:
                record["step_time_s"] = mean_s
            duration = max(record["step_time_s"], 1e-9)
            record |= {"per_s": (record["tokens"] or record["samples"]) / duration, "max_mem_gib": memory}
            record |= {} if step.named is None else step.named(more)
            if self._positions:
                record["positions_per_s"] = self._positions * record["samples"] / duration
            if self._mfu_of:
                record["mfu"] = self._mfu_of * record["samples"] / duration
            self._write("train", record)  # unbuffered: a kill loses nothing that was printed
            if self._env.is_main:
                self._console.step(record, self.checkpoint_note)
            self.last = record

    def values(self, group: str, step: int, values: Mapping[str, float], epoch: float | None = None) -> None:
        """Record numbers of a step beside its own, such as an evaluation's, and print them; one with "/" in
        its name is of one source, and is not printed."""
        self._write(group, {"step": step, **values} | ({} if epoch is None else {"epoch": epoch}))
        if self._env.is_main:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items() if "/" not in name)
            epochs = "" if epoch is None else f", epoch {epoch:.2f}"
            self._console.print_line(f"{shown}  at step {step}{epochs}")

    def texts(self, name: str, step: int, rows: Sequence[Mapping[str, str]], printed: str) -> None:
        """Rows of texts for the sinks that take them, on rank 0."""
        self._console.print_line(printed)
        for sink, losses in self._sinks:
            try:
                if callable(method := getattr(sink, "texts", None)):
                    method(step, {name: rows})
            except Exception as error:  # as in _write
                losses.add(step, error)

    def _write(self, group: str, record: Mapping[str, float]) -> None:
        if self._env.is_main:
            self._metrics.append(record)
            values, step = {}, int(record["step"])
            for name, value in record.items():
                values[f"{group}/{name}"] = float(value)
            del values[f"{group}/step"]
            for sink, losses in self._sinks:
                try:
                    sink.scalars(step, dict(values))
                except Exception as error:  # a full disk, a server that is away, an error in a user's sink
                    losses.add(step, error)
                else:
                    if losses.count:
                        losses.end(step)
        if self._reporter is not None:
            self._reporter.report(record)

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
        if self._reporter is not None:
            self._reporter.report({"step": step}, checkpoint=path)

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


# ---------------------------------------------------------------- TensorBoard
#
# Event files without the tensorboard package, whose import takes more than a second. The format: records of
# length, masked CRC-32C of the length, payload, masked CRC-32C of the payload. The payload is a protobuf
# Event message, of which four fields are used; a scalar event has 40 bytes.

TEXT, TEXT_PLUGIN = b"\x08\x07\x12\x04\x12\x02\x08\x01", b"J\x08\n\x06\n\x04text"
"""A TensorProto of one DT_STRING up to its value, and the metadata of the text plugin."""
BUFFERED = 128
"""Events that wait before a write."""


@functools.cache
def _crc_table() -> list[int]:
    table = []
    for row in range(256):
        for _ in range(8):
            row = (row >> 1) ^ (0x82F63B78 if row & 1 else 0)
        table.append(row)
    return table


def _with_crc(data: bytes) -> bytes:
    crc, table = 0xFFFFFFFF, _crc_table()
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return data + struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


@functools.cache
def _tag(tag: str) -> bytes:
    """A scalar up to its value: the tag's field and the value's first byte."""
    name = _bytes_field(1, tag.encode()) + _varint(2 << 3 | 5)
    return _varint(1 << 3 | 2) + _varint(len(name) + 4) + name


class EventWriter:
    """Appends scalars to one new event file; a restart adds another file, as TensorBoard expects.

    Events are written whole or not at all: TensorBoard stops reading at a broken one.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        """TensorBoard discards the steps of earlier files from `purge_step` on (a resume after a crash)."""
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        self._file = Appender(folder / name, lines=False, buffer=BUFFERED)
        self._write(_bytes_field(3, b"brain.Event:2"))
        session_log = _bytes_field(7, _varint(1 << 3) + _varint(1))  # SessionLog.START
        self._write(_varint(2 << 3) + _varint(purge_step) + session_log)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        summary = b""
        for tag, value in values.items():
            summary += _tag(tag) + bytes(ctypes.c_float(value))  # more than fp32 holds is an infinity
        self._write(_varint(2 << 3) + _varint(step) + _bytes_field(5, summary))

    def texts(self, step: int, values: Mapping[str, Sequence[Mapping[str, str]]]) -> None:
        summary = b""
        for tag, rows in values.items():
            tensor = _bytes_field(8, TEXT + _bytes_field(8, markdown(rows).encode()))
            summary += _bytes_field(1, _bytes_field(1, tag.encode()) + tensor + TEXT_PLUGIN)
        self._write(_varint(2 << 3) + _varint(step) + _bytes_field(5, summary))

    def _write(self, body: bytes) -> None:
        event = _varint(1 << 3 | 1) + struct.pack("<d", time.time()) + body
        self._file.write(_with_crc(struct.pack("<Q", len(event))) + _with_crc(event))

    def close(self) -> None:
        self._file.close()
