"""The wrapper around train() on every launcher: an exception becomes a message, an exit code and RUN/FAILED.

Ray's workers hand the exception to their driver instead of printing it, and use `failure_of` alone.
"""

from __future__ import annotations

import sys
import traceback

from fsdp.base.errors import ConfigError, RefusedError, ShardrunError, TrainingError
from fsdp.config import Config
from fsdp.dist.collectives import Elsewhere, lost_a_neighbour
from fsdp.dist.env import DistEnv, let_rank_0_print
from fsdp.record.console import print_last
from fsdp.run.loop import Outcome, train
from fsdp.run.summary import summary
from fsdp.watch.rank import told
from launch.command import rank_command
from launch.marker import Failure, Marker, failed_before_this_restart, marker_of
from launch.policy import Kind


def run_rank(
    config: Config, env: DistEnv, *, program: str = "train.py", marker: Marker | None = None
) -> tuple[int, Outcome | None]:
    """Train as one rank; print the summary or what went wrong. The exit code, and the outcome if there is
    one.
    """
    marker = marker or marker_of(config)
    before = failed_before_this_restart(marker) if marker is not None else None
    if before is not None:
        if env.local_rank == 0:
            print(
                f"{program}: not tried again, it would fail the same way: {before.message}", file=sys.stderr
            )
        else:
            let_rank_0_print()
        return before.code, None
    try:
        outcome = train(config, env)
    except Exception as error:
        return report(error, env, program, marker), None
    if env.is_main:
        print_last(summary(outcome, config, rank_command(env)))
    return 0, outcome


def report(error: Exception, env: DistEnv, program: str, marker: Marker | None) -> int:
    """Write RUN/FAILED, print the error unless the watch's monitor has printed it, and return the exit code."""
    failure = failure_of(error)
    if marker is not None:
        marker.write(failure, env.rank)
    if isinstance(error, Elsewhere) or told(error):
        return failure.code
    if isinstance(error, ShardrunError):
        if env.is_main or error.scope == "rank" or (error.scope == "node" and env.local_rank == 0):
            print(f"{program}{'' if env.is_main else f' (rank {env.rank})'}: {error}", file=sys.stderr)
        else:
            let_rank_0_print()
    elif failure.echo:
        print(f"[rank {env.rank}] ended because another rank did: {failure.message[:160]}", file=sys.stderr)
    else:
        trace = "".join(traceback.format_exception(error)).rstrip()
        print(f"[rank {env.rank}] failed on {env.device}:\n{trace}", file=sys.stderr)
    return failure.code


def failure_of(error: BaseException) -> Failure:
    if isinstance(error, ShardrunError):
        echo = isinstance(error, Elsewhere)
        return Failure(Kind.ERROR if echo else _kind(error), error.exit_code, str(error), echo)
    first = str(error).partition("\n")[0]
    if lost_a_neighbour(error):
        return Failure(Kind.ERROR, 1, first, echo=True)
    return Failure(Kind.ERROR, 1, f"{type(error).__name__}: {first}")


def _kind(error: ShardrunError) -> Kind:
    if isinstance(error, RefusedError):
        return Kind.REFUSED
    # an error raised from another one, such as a file that could not be read, may be over by the next start
    final = isinstance(error, ConfigError | TrainingError) and error.__cause__ is None
    return Kind.FINAL if final else Kind.ERROR
