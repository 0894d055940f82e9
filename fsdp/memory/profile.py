"""--profile.*: memory and time of chosen steps, each rank for itself, as files under RUN/profile.

    rankN_memory.json              the account (below)
    rankN_memory_snapshot.pickle   on CUDA: python -m torch.cuda._memory_viz trace_plot FILE -o memory.html
    rankN_trace.json.gz            for Perfetto or chrome://tracing
    rankN_steps.json               the trace as a table
    rankN_operators.txt            the 30 operations that take longest: key_averages of torch's profiler
    rankN_startup.json             memory before and after model, sharding and optimizer (startup.py)
    summary.json                   every rank's peak, from rank 0

rankN_memory.json, bytes and seconds:

    format 1, rank, ranks, device, source (`storages` on the CPU, `allocator` on CUDA),
    steps [first, last], parameters of the model
    peak      {bytes, step, phase, kinds {kind: bytes}}: the highest moment of all
    phases    {phase: such a peak}: the highest moment of each phase
    ends      [{step, phase, kinds}]: memory at the end of each phase

Kinds are those of fsdp/memory/account.py. Here: start and end of profiling, and the files. Not here: tracking
of memory (account_*.py), of time (profile_trace.py).
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp.base.phases import Activity, Phases, announces
from fsdp.base.units import byte_size
from fsdp.config import Config, ProfileSection, profile_steps
from fsdp.dist import collectives
from fsdp.dist.env import DistEnv
from fsdp.memory.account import by_size
from fsdp.memory.account_cuda import AllocatorTracker
from fsdp.memory.account_storages import StorageTracker
from fsdp.memory.account_timeline import Mark, ends_of_phases, peaks_by_phase
from fsdp.memory.profile_trace import Tracer

log = logging.getLogger(__name__)


class Profile:
    """Listens to phases; profiles from the first to the last chosen step, then writes its files."""

    def __init__(
        self,
        section: ProfileSection,
        folder: Path,
        env: DistEnv,
        root: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.folder, self._env = folder, env
        self.first, self.last = profile_steps(section.steps)
        self._root, self._optimizer = root, optimizer
        self._section, self._with_memory, self._with_trace = section, section.memory, section.trace
        self.memory: StorageTracker | AllocatorTracker | None = None
        self._trace: Tracer | None = None
        self._on, self._over, self._warned = False, False, False
        self.peak: dict[str, Any] | None = None
        self.table: dict[str, Any] | None = None

    def on_phase(self, phase: str, step: int) -> None:
        if self._over or (phase == "start" and not self._on):
            return
        if not self._on and phase == "data" and self.first <= step <= self.last:
            self._begin()
        elif self._on and (phase == "end" or step > self.last):
            self.close()
        elif not self._on and step > self.last:
            self._too_late(step)
        if self._on:
            mark = Mark(time.perf_counter(), phase, step)
            if self._trace is not None:
                self._trace.phase(mark)
            if self.memory is not None:
                self.memory.phase(mark)

    @announces(Activity.PROFILE)
    def close(self) -> None:
        """Ends profiling and writes its files, after a failure too."""
        if not self._on or self._over:
            self._over = True
            return
        self._over, self._on = True, False
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.memory is not None:
            self._end_memory(self.memory)
        if self._trace is not None:
            self.table = self._trace.close(self._path("trace.json.gz"))
            self._path("steps.json").write_text(json.dumps(self.table, indent=1) + "\n", encoding="utf-8")
            self._path("operators.txt").write_text(self._trace.operators(), encoding="utf-8")

    def finish(self) -> None:
        """After the last step, on every rank: rank 0 logs the results of all. Collective."""
        self.close()
        if self._env.is_main and not self._warned and self.peak is None and self.table is None:
            log.warning(
                "--profile.steps %d:%d: the run has no such step, nothing was profiled", self.first, self.last
            )
        everyones = collectives.all_gather_objects({"peak": self.peak, "table": self.table})
        if not self._env.is_main or (self.peak is None and self.table is None):
            return
        summary = [{"rank": rank, **found} for rank, found in enumerate(everyones)]
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        for line in summary_lines(summary):
            log.info("%s", line)
        log.info("profile: %s", self.folder)

    # ------------------------------------------------------------ begin and end

    def _begin(self) -> None:
        device = self._env.device
        if self._with_memory:
            tracker: StorageTracker | AllocatorTracker = (
                AllocatorTracker(self._root, self._optimizer, device, self._path("memory_snapshot.pickle"))
                if device.type == "cuda"
                else StorageTracker(self._root, self._optimizer, device.type)
            )
            self.folder.mkdir(parents=True, exist_ok=True)
            self.memory = tracker.__enter__()
        if self._with_trace:
            self._trace = Tracer(
                self._section, device, with_account=self._with_memory and device.type == "cpu"
            )
            self._trace.begin()
        self._on = True

    def _end_memory(self, tracker: StorageTracker | AllocatorTracker) -> None:
        tracker.phase(Mark(time.perf_counter(), "end", self.last))
        tracker.__exit__(None, None, None)
        record = self.record(tracker)
        tracker.forget()
        self.peak = record["peak"]
        self._path("memory.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
        self.memory = None

    def record(self, tracker: StorageTracker | AllocatorTracker) -> dict[str, Any]:
        """The account as rankN_memory.json holds it."""
        device, phases = self._env.device, peaks_by_phase(tracker.timeline)
        phases.pop("end", None)
        highest = max(phases.values(), key=lambda peak: peak.bytes)
        return {
            "format": 1,
            "rank": self._env.rank,
            "ranks": self._env.world_size,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "source": "allocator" if isinstance(tracker, AllocatorTracker) else "storages",
            "steps": [self.first, self.last],
            "parameters": sum(parameter.numel() for parameter in self._root.parameters()),
            "peak": highest.as_record(),
            "phases": {phase: peak.as_record() for phase, peak in phases.items()},
            "ends": ends_of_phases(tracker.timeline),
        }

    def _too_late(self, step: int) -> None:
        self._over = self._warned = True
        if self._env.is_main:
            log.warning(
                "--profile.steps %d:%d is before step %d, at which this start resumes. "
                "HINT: --profile.steps %d:%d",
                self.first,
                self.last,
                step,
                step + 2,
                step + 4,
            )

    def _path(self, name: str) -> Path:
        return self.folder / f"rank{self._env.rank}_{name}"


def start(
    config: Config,
    run_dir: Path,
    env: DistEnv,
    root: nn.Module,
    optimizer: torch.optim.Optimizer,
    phases: Phases,
) -> Profile:
    profile = Profile(config.profile, run_dir / "profile", env, root, optimizer)
    phases.listen(profile.on_phase)
    return profile


def summary_lines(summary: list[dict[str, Any]]) -> list[str]:
    lines = []
    for one in summary:
        if one["peak"] is not None:
            peak = one["peak"]
            lines.append(
                f"rank {one['rank']} peak {byte_size(peak['bytes'])} in {peak['phase']} "
                f"of step {peak['step']}: {by_size(peak['kinds'])}"
            )
        if one["table"] is not None:
            parts = one["table"]["mean"]
            shares = ", ".join(
                f"{name} {parts[name] / parts['step']:.0%}" for name in parts if name != "step"
            )
            lines.append(f"rank {one['rank']} step {parts['step'] * 1e3:.1f} ms: {shares}")
    return lines
