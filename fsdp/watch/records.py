"""The files in RUN/watch/: a thread writes them, and the monitor does not wait for storage.

verdicts.jsonl   one object per verdict: time, by (the node whose monitor judged), kind, ranks, nodes, step,
                 what, others, hint, still_s
late.jsonl       one object when a rank begins or ceases to be late: rank, node, percent, since_step
timing.jsonl     one object per interval: from_step, step, seconds, and by rank the mean seconds a step in
                 data, forward, backward, reduce, optimizer, record, evaluate, save, waiting (in collectives,
                 for others), starved. On CUDA forward, backward, optimizer and waiting are device times
KIND-STEP/       the evidence of a verdict: rank-N.txt (stacks), evidence.json (the observations, with each
                 group's calls in PyTorch's flight recorder); of the newest 20 verdicts
"""

from __future__ import annotations

import logging
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp.rundir.history import Appender, read_records
from fsdp.watch.observation import Observation
from fsdp.watch.stragglers import Stragglers

log = logging.getLogger(__name__)

CLOSE_S = 3.0
EVIDENCE = "evidence.json"
KEPT = 20
"""Folders of evidence, the newest: a run that restarts for months has a verdict each time."""
ENDED = "ended"
"""The kind of the record that the watch ends the ranks; it follows the verdict that is the reason."""
OF_DEATHS = ("died", "fault", "lost")


def hang_ended(watch: Path, since: float) -> bool:
    """Whether, after this time, the watch has ended ranks that stood still, and not those of a dead peer."""
    records = read_records(watch / "verdicts.jsonl")
    kinds = [record.get("kind") for record in records if _number(record.get("time")) >= since]
    before = kinds[: kinds.index(ENDED)] if ENDED in kinds else []
    return bool(before) and before[-1] not in OF_DEATHS


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


class RecordFiles:
    """A run directory that is gone gets no record: its folder is not made again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tasks: queue.SimpleQueue[tuple[Path, str | Mapping[str, Any]] | None] = queue.SimpleQueue()
        self._appenders: dict[Path, Appender] = {}
        self._thread = threading.Thread(target=self._serve, name="files", daemon=True)
        self._thread.start()

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        self._tasks.put((self.folder / name, record))

    def write(self, name: str, text: str) -> None:
        self._tasks.put((self.folder / name, text))

    def close(self) -> None:
        """Waits for the storage, CLOSE_S at most."""
        self._tasks.put(None)
        self._thread.join(CLOSE_S)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            path, content = task
            if isinstance(content, str):
                self._write_text(path, content)
            else:
                self._appenders.setdefault(path, Appender(path)).append(content)
        for appender in self._appenders.values():
            appender.close()

    def _write_text(self, path: Path, text: str) -> None:
        """Text that cannot be written is dropped: it describes one moment."""
        try:
            self.folder.mkdir(exist_ok=True)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            if path.name == EVIDENCE:
                self._prune()
        except OSError as error:
            log.warning("watch: %s cannot be written (%s)", path, error.strerror)

    def _prune(self) -> None:
        """Deletes the folders of the oldest verdicts, by time and step, and nothing else in RUN/watch."""
        folders = [
            evidence.parent
            for evidence in self.folder.glob(f"*/{EVIDENCE}")
            if re.fullmatch(r"[a-z-]+-\d{6,}", evidence.parent.name) and not evidence.parent.is_symlink()
        ]
        folders.sort(
            key=lambda folder: ((folder / EVIDENCE).stat().st_mtime_ns, int(folder.name.rpartition("-")[2]))
        )
        for old in folders[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)


# ---------------------------------------------------------------- slow ranks, and times by rank and phase

PAUSE = 20
"""Pause before the next search for slow ranks, as a multiple of what the last one took: with thousands of
ranks it takes longer than the monitor's interval.
"""
TIMING_S, TIMING_SHARE = 2.0, 0.01
"""An interval of timing.jsonl: so many seconds at least, and this share of the run's duration, so that the
logarithm of the duration bounds the file.
"""
TIMING_RANKS = 64
"""Above this many ranks intervals grow with them: a line of 4,096 ranks has 0.9 MB."""


class TimingRecorder:
    def __init__(
        self, late_percent: float, files: RecordFiles, print_lines: Callable[[list[str]], None]
    ) -> None:
        self._files, self._print = files, print_lines
        self._stragglers = Stragglers(late_percent) if late_percent else None
        self._slow_nodes: set[str] = set()
        self._next_at = 0.0
        self._began = time.monotonic()
        self._since: tuple[float, Sequence[Observation]] = 0.0, ()

    def update(self, now: float, ranks: Sequence[Observation], last: bool = False) -> None:
        if not ranks or (now < self._next_at and not last):
            return
        began = time.perf_counter()
        if self._stragglers is not None:
            self._find_late(self._stragglers, ranks)
        self._next_at = now + PAUSE * (time.perf_counter() - began)
        self._write_timing(now, ranks, last)

    def _find_late(self, stragglers: Stragglers, ranks: Sequence[Observation]) -> None:
        nodes: dict[str, set[int]] = {}
        for e in ranks:
            stragglers.feed(e.rank, {int(step): seconds for step, seconds in e.work})
            nodes.setdefault(e.node, set()).add(e.rank)
        for change in stragglers.update():
            node = next(e.node for e in ranks if e.rank == change.rank)
            record: dict[str, object] = {"time": time.time(), "step": change.step}
            if change.late:
                line = f"rank {change.rank} ({node}) is late by {change.percent:.0f}%"
                line += f" since step {change.since_step}"
                record |= {"rank": change.rank, "node": node, "percent": round(change.percent, 1)}
                record["since_step"] = change.since_step
            else:
                line = f"rank {change.rank} is no longer late, at step {change.step}"
                record |= {"over": line, "of": change.rank}
            self._print([f"watch: {line}"])
            self._files.append("late.jsonl", record)
        slow = {
            node for node, there in nodes.items() if 1 < len(there) < len(ranks) and there <= stragglers.late
        }
        for node in sorted(slow - self._slow_nodes):
            hint = "HINT: python -m fsdp.doctor compares the nodes"
            self._print([f"watch: all ranks of {node} are late: it is the node. {hint}"])
        self._slow_nodes = slow

    def _write_timing(self, now: float, ranks: Sequence[Observation], last: bool) -> None:
        """One line per interval: means since the line before it."""
        then, before = self._since
        if [e.rank for e in before] != [e.rank for e in ranks]:
            self._since = now, ranks
            return
        steps = ranks[0].steps - before[0].steps
        interval_s = max(TIMING_S, TIMING_SHARE * (now - self._began)) * max(1.0, len(ranks) / TIMING_RANKS)
        if steps <= 0 or not (last or now - then >= interval_s):
            return
        means = {
            str(e.rank): {
                name: round((seconds - earlier.spent[name]) / steps, 7) for name, seconds in e.spent.items()
            }
            for e, earlier in zip(ranks, before, strict=True)
        }
        step = ranks[0].step
        record = {"time": time.time(), "from_step": step - steps, "step": step}
        self._files.append("timing.jsonl", {**record, "seconds": round(now - then, 3), "ranks": means})
        self._since = now, ranks
