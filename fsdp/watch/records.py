"""The files in RUN/watch/, written by a thread: the monitor does not wait for storage.

verdicts.jsonl   one object per verdict: time, by (the node whose monitor judged), kind, ranks, nodes, step,
                 what, others, hint, still_s
late.jsonl       one object when a rank begins or ceases to be late: rank, node, percent, since_step
timing.jsonl     one object per interval: from_step, step, seconds, and by rank the mean seconds a step in
                 data, forward, backward, reduce, optimizer, record, evaluate, save, waiting (in collectives,
                 for others), starved. On CUDA forward, backward, optimizer and waiting are device times
KIND-STEP/       the evidence of a verdict: rank-N.txt (stacks), rank-N.fr.json (flight recorder),
                 evidence.json (the observations); of the newest 20 verdicts
"""

from __future__ import annotations

import logging
import queue
import re
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp.rundir.history import Appender, read_records

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
