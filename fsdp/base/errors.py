"""The error classes: each names who can correct the cause, and carries a HINT line and an exit code.

ConfigError: the user's flags. LaunchError: the launcher. CheckpointError: the storage. TrainingError: the
numbers. Further exit codes: 6, memory ran out (fsdp/memory/oom.py); 7, the watch ended the rank
(fsdp/watch/node_ranks.py).
"""

from __future__ import annotations

from typing import Literal

from fsdp.base.commands import as_typed


class ShardrunError(Exception):
    """One line that names the field, the value or the rank, and a HINT that works as typed."""

    exit_code = 1
    scope: Literal["all", "node", "rank"] = "all"
    """Which ranks raise it: all (rank 0 prints it), the ranks of one node, or one rank alone."""

    ranks: tuple[int, ...] = ()
    """The ranks at fault, where all ranks raise it and these are known."""
    error_number: int = 0
    """`errno` of the operating system's error behind it, such as errno.ENOSPC; 0 if there is none."""

    def __init__(
        self, message: str, hint: str | None = None, *, ranks: tuple[int, ...] = (), error_number: int = 0
    ) -> None:
        self.hint, self.ranks, self.error_number = hint, ranks, error_number
        super().__init__(as_typed(f"{message} HINT: {hint}" if hint else message))


def error_number(error: BaseException) -> int:
    """`errno` of an OSError, or of the OSError behind one of ours; 0 if there is none."""
    found = error.error_number if isinstance(error, ShardrunError) else getattr(error, "errno", None)
    return found if isinstance(found, int) else 0


def one_line(error: BaseException) -> str:
    """The error's class and message without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split())


class ConfigError(ShardrunError):
    exit_code = 2


class LaunchError(ShardrunError):
    exit_code = 3


class CheckpointError(ShardrunError):
    exit_code = 4


class RefusedError(CheckpointError):
    """Another live job holds the run directory. Another start would be refused too."""


class TrainingError(ShardrunError):
    exit_code = 5


class NotFiniteError(TrainingError):
    """A loss or gradient norm that is NaN or infinite."""


class OneRankError(TrainingError):
    """An error that only this rank has: this rank prints it, with its number in the message."""

    scope = "rank"


class OtherRankFailed(TrainingError):
    """Another rank failed and prints its error; this rank ends with the same exit code."""

    def __init__(self, rank: int, message: str, exit_code: int) -> None:
        super().__init__(f"rank {rank} failed: {message}")
        self.exit_code = exit_code
