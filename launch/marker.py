"""RUN/FAILED: the kind, exit code and message of a start's error, for its launcher.

An exit code alone is ambiguous: torchrun ends with 1 for any code of its ranks, and code 5 is final for
numbers that are not finite but not for a file that could not be read. The file names the start that wrote it,
so a launcher ignores an earlier start's. The next start that holds the run directory removes it
(fsdp/rundir/history.py). No torch here: the batch shell of a Slurm job reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.base.streams import print_line
from fsdp.config import Config
from fsdp.rundir import history
from fsdp.rundir.paths import RunDir, open_run, write_atomically
from launch.policy import Kind

TOKEN = "SHARDRUN_TOKEN"
"""The environment variable that names this start; slurm/lib.sh sets it."""
MOST_BYTES = 1 << 20
"""More than any error message; a longer file is not ours."""


@dataclass(frozen=True)
class Failure:
    """A rank's exception, as launch/policy.py needs it."""

    kind: Kind
    code: int
    message: str
    echo: bool = False
    """Whether another rank's failure caused it."""


@dataclass(frozen=True)
class Marker:
    """The run directory and the name of one start, whose failure is written there."""

    run: RunDir
    start: str
    lock_checked: bool = True
    """Whether the launcher itself has taken the run directory's lock before. Otherwise a configuration error,
    raised before the ranks take it, is not written: the directory may be another job's.
    """

    def write(self, failure: Failure, rank: int) -> None:
        """Write the failure, unless another job holds the run directory or there is none.

        One line if it cannot be written: the disk may be full or away, which may be the failure itself.
        """
        before_the_lock = not self.lock_checked and failure.code == ConfigError.exit_code
        if failure.echo or failure.kind is Kind.REFUSED or before_the_lock:
            return
        record = {
            **asdict(failure),
            "kind": failure.kind.name,
            "rank": rank,
            "start": self.start,
            "time": history.now(),
        }
        try:
            if self.run.path.is_dir():
                write_atomically(self.run.failed, json.dumps(record) + "\n")
        except OSError as error:
            line = f"[rank {rank}] {self.run.failed} cannot be written ({error.strerror}): the launcher"
            print_line(f"{line} decides by exit code {failure.code} alone")

    def read(self) -> Failure | None:
        """The failure of this start; None if no rank has written one, or if it has another form."""
        record = _read_object(self.run.failed)
        kind = Kind.__members__.get(str(record.get("kind")))
        return _failure(record, kind) if kind is not None and record.get("start") == self.start else None


def _read_object(file: Path) -> Mapping[str, Any]:
    """The JSON object of a file; empty if it holds another thing, or is longer than MOST_BYTES."""
    try:
        with file.open("rb") as opened:
            record = json.loads(opened.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _failure(record: Mapping[str, Any], kind: Kind) -> Failure | None:
    code, message = record.get("code"), record.get("message")
    if type(code) is not int or not 1 <= code <= 255 or not isinstance(message, str):
        return None
    return Failure(kind, code, message)


def marker_of(config: Config, environ: Mapping[str, str] = os.environ) -> Marker | None:
    """The marker of this start, named by its launcher's variables; None if no launcher reads one."""
    if not config.run.dir:
        return None
    run = open_run(config.run.dir)
    if environ.get(TOKEN):
        return Marker(run, environ[TOKEN])
    if int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        # all tries of one torchrun have the same agent as their parent
        return Marker(
            run,
            f"{environ.get('TORCHELASTIC_RUN_ID')} {socket.gethostname()} {os.getppid()}",
            lock_checked=False,
        )
    return None


def note_of_torchrun(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file for an error that all ranks meet before they hold a run directory, under `torchrun
    --max-restarts`: in torchrun's own folder, which its tries share. None elsewhere.
    """
    file, restarts = environ.get("TORCHELASTIC_ERROR_FILE", ""), environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if not file or int(restarts) == 0 or len(Path(file).parents) < 4:
        return None
    return Path(file).parents[2] / "shardrun-failed.json"  # of …/attempt_0/LOCAL_RANK/error.json


def note_for_torchrun(failure: Failure, environ: Mapping[str, str] = os.environ) -> None:
    """Keep a final configuration error for torchrun's next try."""
    place = note_of_torchrun(environ)
    if place is None or failure.code != ConfigError.exit_code or failure.kind is not Kind.FINAL:
        return
    with contextlib.suppress(OSError):  # the next try finds the error itself
        write_atomically(place, json.dumps({"code": failure.code, "message": failure.message}) + "\n")


def failed_before_this_restart(
    marker: Marker | None, environ: Mapping[str, str] = os.environ
) -> Failure | None:
    """The final error of an earlier try under `torchrun --max-restarts`, which restarts after any failure."""
    if int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return None
    note = note_of_torchrun(environ)
    noted = _failure(_read_object(note), Kind.FINAL) if note is not None else None
    if noted is not None:
        return noted
    before = marker.read() if marker is not None else None
    return before if before is not None and before.kind is Kind.FINAL else None
