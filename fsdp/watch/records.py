"""The files in RUN/watch/, which a thread writes: the monitor does not wait for storage. And slow ranks.

verdicts.jsonl   one object per verdict: time, by (the node whose monitor judged), kind, ranks, nodes, step,
                 what, others, hint, folder
late.jsonl       one object when a rank begins or ceases to be late: node, rank, step, late, percent,
                 since_step
timing.jsonl     one object per interval: from_step, step, seconds, and by rank the mean seconds a step in
                 data, forward, backward, reduce, optimizer, record, evaluate, save, waiting (in collectives,
                 for others), starved. On CUDA forward, backward, optimizer and waiting are device times
KIND-STEP/       the evidence of a verdict: rank-N.txt (stacks), evidence.json (the observations, with each
                 group's calls in PyTorch's flight recorder); of the newest 20 verdicts
"""

from __future__ import annotations

import logging
import math
import queue
import shutil
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, median, stdev
from typing import Any

from fsdp.rundir.history import Appender, read_records
from fsdp.watch.observe import Observation

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
    kinds = [record.get("kind") for record in records if record.get("time", 0.0) >= since]
    before = kinds[: kinds.index(ENDED)] if ENDED in kinds else []
    return bool(before) and before[-1] not in OF_DEATHS


def failed_node(watch: Path, since: float) -> str:
    """The node that the newest verdict after this time names; empty if it names none, or several."""
    verdicts = [r for r in read_records(watch / "verdicts.jsonl") if r.get("time", 0.0) >= since]
    nodes: list[str] = next((r["nodes"] for r in reversed(verdicts) if r.get("nodes")), [])
    return nodes[0].partition(".")[0] if len(nodes) == 1 else ""


class RecordFiles:
    """A run directory that is gone gets no record: its folder is not made again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tasks: queue.SimpleQueue[tuple[Path, str | Mapping[str, Any]] | None] = queue.SimpleQueue()
        self._appenders: dict[Path, Appender] = {}
        self._thread = threading.Thread(target=self._serve, name="files", daemon=True)
        self._thread.start()

    def put(self, name: str, content: str | Mapping[str, Any]) -> None:
        """A file's text, or a record that is appended to it."""
        self._tasks.put((self.folder / name, content))

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
        """Deletes the folders of the oldest verdicts, and nothing else in RUN/watch."""
        evidence = sorted(self.folder.glob(f"*-[0-9]*/{EVIDENCE}"), key=lambda file: file.stat().st_mtime_ns)
        for old in evidence[:-KEPT]:
            shutil.rmtree(old.parent, ignore_errors=True)


# ---------------------------------------------------------------- slow ranks
#
# The duration of a collective does not tell who is late: all ranks wait in it for the last one, which itself
# hardly waits. So the own work of each step (data, forward, backward, optimizer, without the waiting) is
# compared between ranks, step by step. A rank is late if its excess over the others reaches the requested
# percentage and stands out of the noise, by how much the steps of the window differ.

WINDOW, HALF = 28, 14
"""Steps that are judged together."""
TRIM = 3
"""Steps at either extreme of the window that do not count, such as one with a pause."""
LASTING = 1.25
"""Noise that lasts for some steps makes the mean of a window vary by so much more than that of single steps.
At 1.0 ranks were named for noise with a correlation of 0.3 between steps, at 1.3 late ranks too late.
"""
CHANCE = 2e-6
"""Probability that noise alone makes a window of any rank stand out: an hour has 100,000 windows.
tests/watch/test_stragglers.py checks it with noise of several kinds.
"""
LEAST_S = 2e-4
"""Least lateness of a step: less is noise of the clocks and of Python."""

Work = Mapping[int, float]
"""Step → own work in seconds."""


@dataclass(frozen=True)
class Change:
    """A rank begins to be late, by `percent` since a step; or it is no longer late."""

    rank: int
    step: int
    late: bool = False
    percent: float = 0.0
    since_step: int = 0


class Stragglers:
    """Takes each rank's last steps, and returns who begins to be late and who has caught up."""

    def __init__(self, least_percent: float) -> None:
        self._least = math.log1p(least_percent / 100)
        self._work: dict[int, dict[int, float]] = {}
        self._seen = 0
        self._excess: dict[int, deque[float]] = {}
        """By rank, for each step of the window: the logarithm of its work over the median of the others'."""
        self._typical = 0.0
        self.late: set[int] = set()

    def feed(self, rank: int, steps: Work) -> None:
        rows = self._work.setdefault(rank, {})
        for step, work in steps.items():
            if step > self._seen:
                rows[step] = work

    def update(self) -> list[Change]:
        """Changes since the last call. Every step is judged, however many have come at once."""
        if len(self._work) < 2:
            return []
        changes: list[Change] = []
        for step in sorted(set.intersection(*(set(rows) for rows in self._work.values()))):
            self._note(step)
            if len(next(iter(self._excess.values()))) == WINDOW:
                changes += self._judged(step)
        return changes

    def _note(self, step: int) -> None:
        if step != self._seen + 1 or self._excess.keys() != self._work.keys():
            self._excess = {}  # after a gap in steps or ranks the history starts again
        self._seen = step
        works = {rank: max(rows[step], LEAST_S) for rank, rows in self._work.items()}
        for rows in self._work.values():
            for old in [known for known in rows if known <= step]:
                del rows[old]
        ordered = sorted(works.values())
        self._typical = median(ordered)
        for rank, work in works.items():
            window = self._excess.setdefault(rank, deque(maxlen=WINDOW))
            window.append(math.log(work / _median_without(ordered, work)))

    def _judged(self, step: int) -> list[Change]:
        changes: list[Change] = []
        for rank, values in self._excess.items():
            window = sorted(values)
            excess = sum(window[TRIM:-TRIM]) / (WINDOW - 2 * TRIM)
            if rank in self.late:
                # half as late still counts: a rank at the limit is not reported again and again
                if excess < self._least / 2:
                    self.late.remove(rank)
                    changes.append(Change(rank, step))
            elif excess >= self._least and self._stands_out([*values], window, excess):
                self.late.add(rank)
                recent = median([*values][-HALF:])
                slow_steps = sum(value > recent / 2 for value in window)
                changes.append(Change(rank, step, True, 100 * math.expm1(recent), step - slow_steps + 1))
        return changes

    def _stands_out(self, values: Sequence[float], window: Sequence[float], excess: float) -> bool:
        if min(median(values[:HALF]), median(values[HALF:])) < self._least / 2:
            return False  # a burst
        # the trimmed mean's standard error (Yuen, from the winsorized deviation)
        winsorized = [min(max(value, window[TRIM]), window[-TRIM - 1]) for value in window]
        error = stdev(winsorized) / math.sqrt(WINDOW) / (1 - 2 * TRIM / WINDOW)
        # 4.8 standard errors for 2 ranks, 5.0 for 8, 5.9 for 1,000
        errors = NormalDist().inv_cdf(1 - CHANCE / len(self._excess))
        return excess >= errors * LASTING * error and math.expm1(excess) * self._typical >= LEAST_S


def _median_without(ordered: Sequence[float], value: float) -> float:
    """The median of all others, without a sort per rank: there may be thousands of ranks."""
    left_out, others = bisect_left(ordered, value), len(ordered) - 1
    low, high = (ordered[place + (place >= left_out)] for place in ((others - 1) // 2, others // 2))
    return (low + high) / 2


# ---------------------------------------------------------------- times by rank and phase

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
        nodes = {e.rank: e.node for e in ranks}
        for e in ranks:
            stragglers.feed(e.rank, {int(step): seconds for step, seconds in e.work})
        for change in stragglers.update():
            node, percent = nodes[change.rank], change.percent
            line = f"rank {change.rank} is no longer late, at step {change.step}"
            if change.late:
                line = f"rank {change.rank} ({node}) is late by {percent:.0f}% since step {change.since_step}"
            self._print([f"watch: {line}"])
            self._files.put("late.jsonl", {"time": time.time(), "node": node, **vars(change)})

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
        self._files.put("timing.jsonl", {**record, "seconds": round(now - then, 3), "ranks": means})
        self._since = now, ranks
