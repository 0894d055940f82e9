"""Files fetched once a node: one process downloads, the others wait, and what is half there never has the
real name.

fetch() is called by every rank. A lock file in the folder decides who works; a rank that waited for one that
failed reports the same failure and does not try again. Not here: which files, or what is in them.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import logging
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0  # without a byte
LOCK = ".download.lock"


class DownloadError(Exception):
    """One line: what could not be fetched, and why."""


def fetch(folder: Path, missing: Callable[[], list[str]], get: Callable[[str, Path], Path]) -> None:
    """Until missing() is empty: get(name, folder for its work) gives a whole file, which then appears in
    `folder`.

    OSError where the folder cannot be written; DownloadError where a file cannot be had.
    """
    if not missing():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+", encoding="utf-8") as lock:
        waited = _take(lock.fileno())
        lock.seek(0)
        if (failure := lock.read()) and waited and missing():
            raise DownloadError(failure)
        lock.truncate(0)
        try:
            _fill(folder, missing(), get)
        except DownloadError as error:
            lock.write(str(error))
            raise


def _take(descriptor: int) -> bool:
    """Hold the lock until the file is closed or the process ends; whether someone else held it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return True
    except OSError as error:
        # A file system without locks: each rank then downloads for itself, and each rename is of a whole
        # file.
        log.warning("no lock on this file system (%s): each rank downloads for itself", error.strerror)
        return False


def _fill(folder: Path, names: list[str], get: Callable[[str, Path], Path]) -> None:
    for name in names:
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as work:
            whole = get(name, Path(work))
            with whole.open("rb") as file:
                os.fsync(file.fileno())
            whole.replace(folder / name)


def download(url: str, path: Path) -> None:
    """The whole of a URL in a file, or DownloadError."""
    try:
        with _opened(url) as answer, path.open("wb") as file:
            shutil.copyfileobj(answer, file, 1 << 20)
            promised = answer.headers.get("Content-Length")
    except (
        urllib.error.URLError,
        http.client.HTTPException,
        TimeoutError,
        ConnectionError,
        ValueError,
    ) as error:
        raise DownloadError(
            f"{url}: {getattr(error, 'reason', None) or error or type(error).__name__}"
        ) from error
    if promised is not None and path.stat().st_size != int(promised):
        raise DownloadError(f"{url}: {path.stat().st_size} bytes came of {promised}")


@contextlib.contextmanager
def _opened(url: str) -> Iterator[http.client.HTTPResponse]:
    request = urllib.request.Request(url, headers={"User-Agent": "shardrun"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        yield answer
