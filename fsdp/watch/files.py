"""What stays in RUN/watch/, written by a thread: the monitor must not stand still where storage does.

verdicts.jsonl      an object a verdict: time, by (the node that judged), kind, ranks, nodes, step, what, others, hint, still_s
late.jsonl          an object each time a rank is found late, or is not any more: rank, node, percent, since_step, starved
timing.jsonl        an object an interval: from_step, step, seconds, and by rank the mean seconds a step in data, forward,
                    backward, reduce, optimizer, record, evaluate, save, waiting (in collectives, for others), starved. On CUDA
                    forward, backward, optimizer and waiting are the device's times, the rest the host's
KIND-STEP/          what a verdict rests on: rank-N.txt (stacks), rank-N.fr.json (flight recorder), evidence.json
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PATIENCE_S = 3.0


class Files:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tasks: queue.SimpleQueue[tuple[Path, str, str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="files", daemon=True)
        self._thread.start()
        self.failed = ""
        """The last thing that could not be written."""

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        self._tasks.put((self.folder / name, json.dumps(record) + "\n", "a"))

    def write(self, name: str, text: str) -> None:
        self._tasks.put((self.folder / name, text, "w"))

    def close(self) -> None:
        """Waits for the storage, but not for ever: the process that asks has said all it has to say."""
        self._tasks.put(None)
        self._thread.join(PATIENCE_S)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            path, text, mode = task
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open(mode, encoding="utf-8") as file:
                    file.write(text)
            except OSError as error:
                self.failed = f"{path}: {error.strerror}"
