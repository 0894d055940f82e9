"""What the torture and the soak have done so far: a list of sittings in a JSON file, and a page beside it.

A sitting is written as it goes, so one that ends at any moment counts what was checked until then. Two
sittings may write at the same time.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import tables

Sitting = dict[str, Any]
OFTEN_S = 1.0


class Record:
    """One sitting's place in the file. Thread-safe. Without a file it only counts."""

    def __init__(self, file: Path | None, page: Callable[[Sequence[Sitting]], str], **facts: object) -> None:
        self._file, self._page, self._lock = file, page, threading.Lock()
        self._began = time.monotonic()
        self._written = float("-inf")
        self.sitting: Sitting = {
            "machine": tables.machine(),
            "commit": tables.checked_out(),
            "began": time.time(),
            "seconds": 0.0,
            "violations": [],
            **facts,
        }
        self._key = [self.sitting["began"], os.getpid()]
        self.sitting["key"] = self._key
        self.write()

    def count(self, amounts: Mapping[str, float] | None = None, **names: str) -> None:
        """Adds one to each counter: of `moments`, the one named `saving`. `amounts` are added with them: a
        file that is written in between would have the one without the other.
        """
        with self._lock:
            self._add(amounts or {})
            for counter, name in names.items():
                counts = self.sitting.setdefault(counter, {})
                counts[name] = counts.get(name, 0) + 1
            self._write_at_times()

    def add(self, **amounts: float) -> None:
        with self._lock:
            self._add(amounts)
            self._write_at_times()

    def _add(self, amounts: Mapping[str, float]) -> None:
        for name, amount in amounts.items():
            self.sitting[name] = self.sitting.get(name, 0) + amount

    def most(self, **values: float) -> None:
        with self._lock:
            for name, value in values.items():
                self.sitting[name] = max(self.sitting.get(name, value), value)

    def set(self, **values: object) -> None:
        with self._lock:
            self.sitting.update(values)
            self._write_at_times()

    def violation(self, text: str) -> int:
        """How many there are by now."""
        with self._lock:
            self.sitting["violations"].append(text)
            self._write()
            found: list[str] = self.sitting["violations"]
            return len(found)

    def write(self) -> None:
        with self._lock:
            self._write()

    def _write_at_times(self) -> None:
        if time.monotonic() - self._written > OFTEN_S:
            self._write()

    def _write(self) -> None:
        self.sitting["seconds"] = round(time.monotonic() - self._began, 1)
        self._written = time.monotonic()
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self._file.parent):
            sittings = [one for one in read(self._file) if one["key"] != self._key] + [self.sitting]
            _replace(self._file, json.dumps({"sittings": sittings}, indent=1) + "\n")
            _replace(self._file.with_suffix(".md"), self._page(sittings))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read(file: Path) -> list[Sitting]:
    """The sittings so far; none without the file."""
    if not file.exists():
        return []
    found: list[Sitting] = json.loads(file.read_text())["sittings"]
    return found


def _replace(file: Path, text: str) -> None:
    aside = file.with_suffix(f".{os.getpid()}.tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(file)


# ---------------------------------------------------------------- pages


def total(sittings: Iterable[Sitting], name: str) -> float:
    return sum(one.get(name, 0) for one in sittings)


def counted(sittings: Iterable[Sitting], name: str) -> Counter[str]:
    counts = Counter[str]()
    for one in sittings:
        counts.update(one.get(name, {}))
    return counts


def listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in Counter(counts).most_common()) or "none"


def day(sitting: Sitting) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(sitting["began"]))


def left_out(sittings: Iterable[Sitting]) -> str:
    lines = dict.fromkeys(line for one in sittings for line in one.get("left_out", ()))
    return "; ".join(lines) or "nothing"


def violations(sittings: Iterable[Sitting]) -> list[str]:
    return [f"- {day(one)}, seed {one['seed']}: {text}" for one in sittings for text in one["violations"]]
