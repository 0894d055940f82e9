"""The wrapper around train() on every launcher: an exception becomes a message, an exit code and RUN/FAILED.

A Ray worker sends its exception to the driver instead of printing it, and uses `failure_of` alone. torch is
imported by `run_rank` alone: `refuse` reports a wrong flag without waiting for that.
"""

from __future__ import annotations

import os
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
from fsdp.base.text import print_line
from fsdp.config import Config
from fsdp.dist.env import DistEnv, prints_errors_of_node, prints_shared_errors, wait_for_rank_0_to_print
from fsdp.dist.network import is_lost_peer
from fsdp.record.console import print_last
from fsdp.watch.failure import write_torchrun_error_file
from launch.command import rank_command
from launch.marker import Failure, Kind, Marker, marker_of

if TYPE_CHECKING:
    from fsdp.run.evaluate import Outcome


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
        return report(error, env, program, marker), None
    if env.is_main:
        print_last(summary(outcome, config, rank_command(env)))
    return 0, outcome


def already_failed(marker: Marker | None, program: str) -> int | None:
    """The exit code of the final error of an earlier try under `torchrun --max-restarts`, which repeats any
    failure; None if this try may train. It prints that error again, and imports no torch.
    """
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    before = marker.read() if restarted and marker is not None else None
    if before is None or before.kind is not Kind.FINAL:
        return None
    if prints_shared_errors():
        print_line(f"{program}: not tried again, it would fail the same way: {before.message}")
    else:
        wait_for_rank_0_to_print()
    write_torchrun_error_file(before.message)
    return before.code


def refuse_ray(config: Config, launcher: str) -> None:
    """Raises ConfigError for --backend ray behind a launcher that starts the ranks itself."""
    if config.backend == "ray":
        raise ConfigError(
            f"--backend ray starts the ranks, and so does {launcher}.",
            "--backend torchrun, or python train.py --backend ray with nothing in front",
        )


def refuse(error: ShardrunError, program: str) -> int:
    """Print an error found before training, once for all ranks that meet it, and return its exit code."""
    once = {"all": prints_shared_errors, "node": prints_errors_of_node}.get(error.scope)
    if once is None or once():
        print_line(f"{program}: {error}")
    else:
        wait_for_rank_0_to_print()
    write_torchrun_error_file(str(error))
    return error.exit_code


def interrupted(program: str) -> int:
    """Print that Ctrl-C came before the ranks record it as a stop request, and return the exit code."""
    from launch.policy import EXIT_INTERRUPTED

    if prints_shared_errors():
        print_line(f"{program}: interrupted while it started; no step was trained.")
    return EXIT_INTERRUPTED


def report(error: BaseException, env: DistEnv, program: str, marker: Marker | None) -> int:
    """Write RUN/FAILED, print the error unless the monitor has printed it, and return the exit code."""
    from fsdp.watch.failure import failure_was_printed, printed

    failure = failure_of(error)
    if marker is not None:
        marker.write(failure, env.rank)
    scope = error.scope if isinstance(error, ShardrunError) else "rank"
    if failure_was_printed(error):
        return failure.code
    is_first = env.is_main or scope == "rank" or (scope == "node" and env.local_rank == 0)
    if isinstance(error, OtherRankFailed) or not is_first:
        wait_for_rank_0_to_print()
    else:
        print_line(printed(error, env, program))
    if isinstance(error, ShardrunError) and not isinstance(error, OtherRankFailed):
        write_torchrun_error_file(str(error))
    return failure.code


def failure_of(error: BaseException) -> Failure:
    """The kind, exit code and message of an exception, as launch/policy.py and RUN/FAILED need them."""
    if isinstance(error, ShardrunError):
        lost = error.__cause__ is not None and is_lost_peer(error.__cause__)
        echo = isinstance(error, OtherRankFailed) or lost
        if isinstance(error, RefusedError):
            return Failure(Kind.REFUSED, error.exit_code, str(error), echo)
        # an error with another as its cause, such as a file that could not be read, may not repeat at the
        # next start
        final = isinstance(error, ConfigError | TrainingError) and error.__cause__ is None and not echo
        return Failure(Kind.FINAL if final else Kind.ERROR, error.exit_code, str(error), echo)
    if is_lost_peer(error):
        return Failure(Kind.ERROR, 1, first_line(error, 2000), echo=True)
    return Failure(Kind.ERROR, 1, exception_line(error))
