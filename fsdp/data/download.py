"""Downloads files once per node, by one process while the others wait. Partial files have temporary names.

Every rank calls fetch(). A lock file in the folder selects the one that downloads; a rank that waited for one
that failed reports the same failure and does not retry. Not here: which files, and their contents.
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
    """One line: which file could not be downloaded, and why."""


def fetch(folder: Path, missing: Callable[[], list[str]], get: Callable[[str, Path], Path]) -> None:
    """Calls get(name, work folder) for each file of missing(), and moves the whole file that it returns to
    `folder`.

    Raises OSError if the folder cannot be written, DownloadError if a file cannot be downloaded.
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
    """Takes the lock until the file is closed or the process ends; returns whether it had to wait."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return True
    except OSError as error:
        # A file system without locks: each rank downloads for itself, and renames a whole file.
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
    """Downloads a URL to a file; DownloadError if it is not complete."""
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
        raise DownloadError(f"{url}: {path.stat().st_size} of {promised} bytes received")


@contextlib.contextmanager
def _opened(url: str) -> Iterator[http.client.HTTPResponse]:
    request = urllib.request.Request(url, headers={"User-Agent": "shardrun"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        yield answer
