"""A run directory as a tool reads it: a folder, or the files of a URL in a temporary folder.

No lock is taken: the files are those of the run's last copy (run_mirror.py). Checkpoints stay in the store.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdp.base.errors import CheckpointError, ConfigError, error_number
from fsdp.base.object_client import is_url
from fsdp.checkpoint.object_store import ObjectStore
from fsdp.checkpoint.run_files import EXPORTS, fetch
from fsdp.rundir.lock import FILE as LOCK
from fsdp.rundir.paths import RunDir

NO_LIMIT = 1 << 62


class RunSource(RunDir):
    """The files of a run directory, in a folder of this machine; `url` is where they are from."""

    @property
    def checkpoints(self) -> str:
        """Where its checkpoints are, if its configuration names no other place."""
        return f"{self.place}/checkpoints"

    def read(self, export_bytes: int) -> None:
        """Reads the files of a URL, again after a first time. An export of more bytes is left out."""
        if not self.url:
            return
        store = ObjectStore(self.url)
        try:
            export = sum(size for name, size in store.objects().items() if name.startswith(f"{EXPORTS[0]}/"))
            left_out = EXPORTS[1:] if export <= export_bytes else EXPORTS
            if not fetch(store, self.path, without=left_out):
                hint = "give the --run.dir of a run that has started"
                raise ConfigError(f"{self.url} is not a run directory: it holds no files of a run.", hint)
            self._read_lock(store)
        except OSError as error:
            hint = "AWS_ENDPOINT_URL and keys are read from the environment"
            raise CheckpointError(f"{error}.", hint, error_number=error_number(error)) from None

    def _read_lock(self, store: ObjectStore) -> None:
        """The lock's time of renewal shows whether the run is in progress."""
        renewed, file = store.modified_at(LOCK), self.path / LOCK
        file.unlink(missing_ok=True)
        if renewed is not None:
            file.touch()
            os.utime(file, (renewed, renewed))


def output_of(place: str, name: str) -> Path:
    """A tool's own file: in the run directory, or for a URL in the working directory, with the run's name."""
    return Path(f"{_last_part(place)}-{name}") if is_url(place) else Path(place, name)


def _last_part(url: str) -> str:
    return url.rstrip("/").rpartition("/")[2] or "run"


@contextmanager
def opened(place: str, *, export_bytes: int = 0) -> Iterator[RunSource]:
    """The run directory of a folder or a URL; of an export only one of at most `export_bytes`."""
    if not is_url(place):
        yield RunSource(Path(place))
        return
    url = place.rstrip("/")
    with tempfile.TemporaryDirectory(prefix="shardrun-run-") as folder:
        source = RunSource(Path(folder, _last_part(url)), url)
        source.read(export_bytes)
        yield source
