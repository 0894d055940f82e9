"""RUN/FAILED: the kind, exit code and message of a start's error, for its launcher.

An exit code alone is ambiguous: torchrun ends with 1 for any code of its ranks, and code 5 is final for
numbers that are not finite but not for a file that could not be read. The file names the start that wrote it,
so a launcher ignores an earlier start's. The next start that holds the run directory removes it
(fsdp/rundir/history.py). No torch here: the batch shell of a Slurm job reads it.
"""

from __future__ import annotations

import enum
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from fsdp.base.errors import ConfigError
from fsdp.base.text import print_line
from fsdp.config import Config
from fsdp.rundir import history
from fsdp.rundir.paths import RunDir, open_run, write_atomically

TOKEN = "SHARDRUN_TOKEN"
"""The environment variable that names this start; slurm/lib.sh sets it."""
MOST_BYTES = 1 << 20
"""More than any error message; a longer file is not ours."""


class Kind(enum.Enum):
    """How a start ended."""

    DONE = "the last step was reached"
    STOPPED = "a person asked it to stop"
    PREEMPTED = "the scheduler asked it to stop"
    NODES_LEAVE = "Ray announced that a node leaves"
    REFUSED = "another job writes the run directory"
    FINAL = "an error that another start would repeat"
    ERROR = "an error"
    DIED = "a rank ended without an error message"
    UNMET = "the rendezvous failed"


@dataclass(frozen=True)
class Failure:
    """A rank's exception, as launch/policy.py needs it."""

    kind: Kind
    code: int
    message: str
    echo: bool = False
    """Whether another rank's failure caused it."""
    trace: str = ""
    """Its traceback, where a launcher other than the rank prints it."""


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
            "kind": failure.kind.name,
            "code": failure.code,
            "message": failure.message,
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
        try:
            with self.run.failed.open("rb") as file:
                record = json.loads(file.read(MOST_BYTES))
            kind, code, message = Kind[record["kind"]], record["code"], record["message"]
        except (OSError, ValueError, RecursionError, TypeError, KeyError):
            return None
        valid = type(code) is int and 1 <= code <= 255 and isinstance(message, str)
        return Failure(kind, code, message) if valid and record.get("start") == self.start else None


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
