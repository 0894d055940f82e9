"""The wrapper around train() on every launcher: an exception becomes a message, an exit code and RUN/FAILED.

RUN/FAILED has the kind, exit code and message of a start's error, for its launcher: an exit code alone is
ambiguous. torchrun ends with 1 for any code of its ranks, and code 5 is final for numbers that are not finite
but not for a file that could not be read. The file names the start that wrote it, so a launcher ignores an
earlier start's. The next start that holds the run directory removes it (fsdp/rundir/history.py).

A Ray worker sends its exception to the driver instead of printing it, and uses `failure_of` alone. torch is
imported by `run_rank` alone: the batch shell of a Slurm job reads RUN/FAILED, and a wrong flag does not wait.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp.base.errors import (
    ConfigError,
    OtherRankFailed,
    RefusedError,
    ShardrunError,
    TrainingError,
    exception_line,
    first_line,
)
from fsdp.base.phases import StopReason
from fsdp.base.text import print_line
from fsdp.config import Config
from fsdp.distributed.env import DistEnv, is_lost_peer, prints_on_node, prints_shared_errors, wait_for_rank_0
from fsdp.rundir import history
from fsdp.rundir.history import RunDir, open_run, write_atomically
from fsdp.watch.status_page import write_torchrun_error_file
from launch.command import rank_command

if TYPE_CHECKING:
    from fsdp.run.evaluate import Outcome

TOKEN = "SHARDRUN_TOKEN"
"""The environment variable that names this start; slurm/lib.sh sets it."""
EXIT_INTERRUPTED = 130
"""The exit code after Ctrl-C where nothing is saved: while a start begins, or a second one later."""
AFTER = 'while grep -qs "^State:.*[^ZX] (" "/proc/$0/status"; do sleep 0.05; done; printf "%s\\n" "$1" >&2'
"""The process that waits holds the pipes of whoever reads the output, and who reads to the end before it
waits leaves the agent a zombie, for which `kill -0` succeeds for ever.
"""
MOST_BYTES = 1 << 20
"""Of RUN/FAILED: more than any error message."""


class Kind(enum.Enum):
    """How a start ended."""

    DONE = "the last step was reached"
    STOPPED = "a person asked it to stop"
    PREEMPTED = "the scheduler asked it to stop"
    NODES_LEAVE = "Ray announced that a node leaves"
    REFUSED = "another job writes the run directory"
    FINAL = "an error that another start would repeat"
    PROGRAM = "an error of the program itself"
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


PROGRAM_ERRORS = (ImportError, SyntaxError, NameError, AttributeError, TypeError, NotImplementedError)
"""Before the first step of a run another start repeats them; later a sample may be the cause."""


def failure_of(error: BaseException) -> Failure:
    """The kind, exit code and message of an exception."""
    echo = is_lost_peer(error)
    if not isinstance(error, ShardrunError):
        message = first_line(error, 2000) if echo else exception_line(error)
        kind = Kind.PROGRAM if isinstance(error, PROGRAM_ERRORS) and not echo else Kind.ERROR
        return Failure(kind, 1, message, echo)
    lost = error.__cause__ is not None and is_lost_peer(error.__cause__)
    echo = isinstance(error, OtherRankFailed) or lost
    users, cause = isinstance(error, ConfigError | TrainingError) and not echo, error.__cause__
    kind = Kind.REFUSED if isinstance(error, RefusedError) else Kind.ERROR
    if users and (cause is None or isinstance(cause, PROGRAM_ERRORS)):
        # another cause, such as a file that could not be read, may not repeat
        kind = Kind.PROGRAM if cause else Kind.FINAL
    return Failure(kind, error.exit_code, str(error), echo)


# ---------------------------------------------------------------- RUN/FAILED


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
        about = {"kind": failure.kind.name, "code": failure.code, "message": failure.message}
        record = {**about, "rank": rank, "start": self.start, "time": history.now()}
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
    if config.run.dir and environ.get(TOKEN):
        return Marker(open_run(config.run.dir), environ[TOKEN])
    if config.run.dir and int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        # all tries of one torchrun have the same agent as their parent
        start = f"{environ.get('TORCHELASTIC_RUN_ID')} {socket.gethostname()} {os.getppid()}"
        return Marker(open_run(config.run.dir), start, lock_checked=False)
    return None


def already_failed(marker: Marker | None, program: str) -> int | None:
    """The exit code of the final error of an earlier try under `torchrun --max-restarts`, which repeats any
    failure; None if this try may train. It prints that error again, and imports no torch.
    """
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    before = marker.read() if restarted and marker is not None else None
    if before is None or before.kind is not Kind.FINAL:
        return None
    _print_once(f"{program}: not tried again, it would fail the same way: {before.message}")
    write_torchrun_error_file(before.message)
    return before.code


# ---------------------------------------------------------------- one rank


def run_rank(
    config: Config, env: DistEnv, *, program: str = "train.py", marker: Marker | None = None
) -> tuple[int, Outcome | None]:
    """Train as one rank and print the summary or the error. Returns the exit code, and the outcome of a
    training that did not fail.
    """
    from fsdp.run.loop import train
    from fsdp.run.summary import summary

    marker = marker or marker_of(config)
    if (code := already_failed(marker, program)) is not None:
        return code, None
    try:
        outcome = train(config, env, process_ends=True)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # user code may call sys.exit, with 0 too, and asyncio's CancelledError is no Exception
        code = report(error, env, program, marker)
        if (run := getattr(error, "run_dir", None)) is not None:
            _print_end(run, config, env, "failed")
        return code, None
    if env.is_main:
        _print_summary(summary(outcome, config, rank_command(env)))
    if StopReason.read(outcome.stopped) in (StopReason.SIGINT, StopReason.SIGTERM):
        _print_end(outcome.run_dir, config, env, "stopped")
    return 0, outcome


def _print_end(run: Path, config: Config, env: DistEnv, how: str) -> None:
    """The last lines of a terminal. torchrun's agent, which starts the ranks, prints a traceback after them:
    a process that outlives it prints the lines once more. Not where something else decides on a restart.
    """
    from fsdp.run.summary import last_lines

    torchrun, command = os.environ.get("TORCHELASTIC_ERROR_FILE"), rank_command(env)
    if TOKEN in os.environ or env.launcher == "launch.local" or os.getppid() == 1:  # it was killed
        return
    if torchrun is None:
        if env.is_main and how == "failed":
            print_line(last_lines(run, config, command))
        return
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"):
        return
    text = last_lines(
        run, config, command, f" It {how}; a traceback above of torch.distributed is torchrun's."
    )
    with contextlib.suppress(OSError):  # the first rank of the node does
        os.close(os.open(Path(torchrun).parent.parent / "last_lines", os.O_CREAT | os.O_EXCL))
        words = ["sh", "-c", AFTER, str(os.getppid()), text]
        subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)


def _print_summary(text: str) -> None:
    """A full log does not make the run fail."""
    try:
        print_line(text, sys.stdout)
    except OSError as error:
        with contextlib.suppress(OSError):
            print_line(f"the summary cannot be printed ({error.strerror})")


def report(error: BaseException, env: DistEnv, program: str, marker: Marker | None) -> int:
    """Write RUN/FAILED, print the error unless the monitor has printed it, and return the exit code."""
    from fsdp.watch.status_page import failure_was_printed, printed

    failure = failure_of(error)
    if marker is not None:
        marker.write(failure, env.rank)
    scope = error.scope if isinstance(error, ShardrunError) else "rank"
    if failure_was_printed(error):
        return failure.code
    is_first = env.is_main or scope == "rank" or (scope == "node" and env.local_rank == 0)
    if isinstance(error, OtherRankFailed) or not is_first:
        wait_for_rank_0()
    else:
        print_line(printed(error, env, program))
    if isinstance(error, ShardrunError) and not isinstance(error, OtherRankFailed):
        write_torchrun_error_file(str(error))
    return failure.code


# ---------------------------------------------------------------- before the ranks


def refuse_ray(config: Config, launcher: str) -> None:
    """Raises ConfigError for --backend ray behind a launcher that starts the ranks itself."""
    if config.backend == "ray":
        raise ConfigError(
            f"--backend ray starts the ranks, and so does {launcher}.",
            "--backend torchrun, or python train.py --backend ray with nothing in front",
        )


def refuse(error: ShardrunError, program: str) -> int:
    """Print an error found before training, once for all ranks that meet it, and return its exit code."""
    _print_once(f"{program}: {error}", error.scope)
    write_torchrun_error_file(str(error))
    return error.exit_code


def _print_once(line: str, scope: str = "all") -> None:
    """On one of the ranks that meet an error of this scope."""
    if {"all": prints_shared_errors, "node": prints_on_node}.get(scope, lambda: True)():
        print_line(line)
    else:
        wait_for_rank_0()


def interrupted(program: str) -> int:
    """Print that Ctrl-C came before the ranks record it as a stop request, and return the exit code."""
    if prints_shared_errors():
        print_line(f"{program}: interrupted while it started; no step was trained.")
    return EXIT_INTERRUPTED
