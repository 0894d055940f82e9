"""The lock of one place, with other times than a run's."""

from __future__ import annotations

from pathlib import Path

from fsdp.rundir.lock import Folder, Lock, Place, hold


def acquire(
    where: Path | Place, launcher: str, job: str = "", *, stale_s: float = -1.0, beat_s: float = -1.0
) -> Lock:
    place = Folder(where) if isinstance(where, Path) else where
    place.stale_s = place.stale_s if stale_s < 0 else stale_s
    place.beat_s = place.beat_s if beat_s < 0 else beat_s
    return hold(place, None, launcher, job)
