"""--profile.*: memory and time of chosen steps, each rank for itself, as files under RUN/profile.

    rankN_memory.json              on a CPU: the peak by kind of each phase, and what remained at its end
    rankN_memory_snapshot.pickle   on CUDA: torch's own, for its viewer; the log has the command
    rankN_trace.json.gz            for Perfetto or chrome://tracing
    rankN_operators.txt            the 30 operations that take longest: key_averages of torch's profiler

rankN_memory.json, in bytes: rank, ranks, steps [first, last], peak {bytes, step, phase, kinds {kind: bytes}},
phases {phase: such a peak}, ends [{step, phase, kinds}]. Kinds are those of account.py, which counts them.
Rank 0 logs every rank's peak at the end.
"""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function

from fsdp.base.phases import Activity, Phases, announces
from fsdp.base.text import byte_size
from fsdp.base.torch_private import (
    SNAPSHOT_VIEWER,
    start_allocator_history,
    stop_allocator_history,
    write_allocator_snapshot,
)
from fsdp.config import ProfileSection, profile_steps
from fsdp.distributed import collectives
from fsdp.distributed.env import DistEnv
from fsdp.memory.account import by_size
from fsdp.memory.storages import StorageTracker

log = logging.getLogger(__name__)

HISTORY = 1_000_000
"""Events that CUDA's allocator keeps; a step of a 1B model makes tens of thousands."""
OPERATORS_SHOWN = 30


class Profile:
    """Context manager of the steps: listens to phases, profiles from the first to the last chosen step, and
    writes its files. Collective at its end.
    """

    def __init__(
        self,
        section: ProfileSection,
        folder: Path,
        env: DistEnv,
        root: nn.Module,
        adam: torch.optim.Optimizer,
        phases: Phases,
    ) -> None:
        self.folder = folder
        self.first, self.last = profile_steps(section.steps)
        self._section, self._env, self._root, self._optimizer = section, env, root, adam
        self._tracker: StorageTracker | None = None
        self._tracer: torch.profiler.profile | None = None
        self._range = ExitStack()
        self._on = False
        phases.listen(self.on_phase)
        self._lines: list[str] = []
        """About this rank, which rank 0 logs at the end."""

    def __enter__(self) -> Profile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is not None:
            return
        lines = [line for rank in collectives.all_gather_objects(self._lines) for line in rank]
        for line in lines if self._env.is_main else ():
            log.info("%s", line)
        if self._env.is_main and not lines:
            log.warning(
                "--profile.steps %d:%d: this start made no such step, nothing was profiled. "
                "HINT: --profile.steps with steps after the one at which it resumes",
                self.first,
                self.last,
            )

    def on_phase(self, phase: str, step: int) -> None:
        if not self._on and phase == "data" and self.first <= step <= self.last:
            self._begin()
        elif self._on and (phase == "end" or step > self.last):
            self.close()
        if self._on and self._tracker is not None:
            self._tracker.phase(phase, step)
        if self._on and self._tracer is not None:
            self._range.close()
            self._range.enter_context(record_function(f"shardrun::{phase} of step {step}"))

    @announces(Activity.PROFILE)
    def close(self) -> None:
        """Ends profiling and writes its files, after a failure too."""
        if not self._on:
            return
        self._on = False
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._tracker is not None:
            self._write_account(self._tracker)
        elif self._section.memory:
            self._write_snapshot()
        if self._tracer is not None:
            self._write_trace(self._tracer)

    def _begin(self) -> None:
        self._on, cuda = True, self._env.device.type == "cuda"
        if self._section.memory and cuda:
            torch.cuda.reset_peak_memory_stats(self._env.device)
            start_allocator_history(HISTORY)
        elif self._section.memory:
            self._tracker = StorageTracker(self._root, self._optimizer).__enter__()
        if self._section.trace:
            kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + cuda]
            self._tracer = torch.profiler.profile(activities=kinds)
            self._tracer.start()

    def _write_account(self, tracker: StorageTracker) -> None:
        tracker.phase("end", self.last)
        tracker.__exit__(None, None, None)
        self._tracker = None
        peaks, ends = tracker.account()
        peak = max(peaks.values(), key=lambda peak: peak["bytes"])
        phases = {phase: peak for phase, peak in peaks.items() if phase != "end"}
        ranks, steps = {"rank": self._env.rank, "ranks": self._env.world_size}, [self.first, self.last]
        account = {**ranks, "steps": steps, "peak": peak, "phases": phases, "ends": ends}
        self._path("memory.json").write_text(json.dumps(account) + "\n", encoding="utf-8")
        moment = f"{byte_size(peak['bytes'])} in {peak['phase']} of step {peak['step']}"
        self._lines.append(f"rank {self._env.rank} peak {moment}: {by_size(peak['kinds'])}")

    def _write_snapshot(self) -> None:
        path = self._path("memory_snapshot.pickle")
        try:
            torch.cuda.synchronize(self._env.device)
            write_allocator_snapshot(path)
        finally:
            stop_allocator_history()
        peak = byte_size(torch.cuda.max_memory_allocated(self._env.device))
        self._lines.append(
            f"rank {self._env.rank} peak {peak} allocated: {SNAPSHOT_VIEWER} {path} -o memory.html"
        )

    def _write_trace(self, tracer: torch.profiler.profile) -> None:
        device = self._env.device.type
        self._range.close()
        if device == "cuda":
            torch.cuda.synchronize(self._env.device)
        tracer.stop()
        path = self._path("trace.json.gz")
        tracer.export_chrome_trace(str(path))
        averages = tracer.key_averages()
        table = averages.table(sort_by=f"self_{device}_time_total", row_limit=OPERATORS_SHOWN)
        self._path("operators.txt").write_text(table + "\n", encoding="utf-8")
        self._lines.append(
            f"rank {self._env.rank} trace: open {path} in https://ui.perfetto.dev; operators in operators.txt"
        )

    def _path(self, name: str) -> Path:
        return self.folder / f"rank{self._env.rank}_{name}"
