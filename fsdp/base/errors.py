"""Blame by type: who can mend it decides the class, and a HINT line says how.

ConfigError is the person's, LaunchError the launcher's, CheckpointError the disk's, TrainingError the
numbers'. Exit codes are theirs, and 6 where memory ran out (fsdp/memory/oom.py), 7 where the watch ended the
rank (fsdp/watch/node_ranks.py).
"""

from __future__ import annotations

from typing import Literal


class ShardrunError(Exception):
    """One line that names the field, the value or the rank, and a HINT that works as typed."""

    exit_code = 1
    scope: Literal["all", "node", "rank"] = "all"
    """Who meets it: all ranks alike (one speaks), the ranks of a node that lacks something, or one rank
    alone.
    """

    ranks: tuple[int, ...] = ()
    """The ranks at fault, where all ranks raise it and these are known."""
    error_number: int = 0
    """`errno` of the operating system's error behind it, such as errno.ENOSPC; 0 if there is none."""

    def __init__(
        self, message: str, hint: str | None = None, *, ranks: tuple[int, ...] = (), error_number: int = 0
    ) -> None:
        self.hint, self.ranks, self.error_number = hint, ranks, error_number
        super().__init__(f"{message} HINT: {hint}" if hint else message)


def error_number(error: BaseException) -> int:
    """`errno` of an OSError, or of the OSError behind one of ours; 0 if there is none."""
    found = error.error_number if isinstance(error, ShardrunError) else getattr(error, "errno", None)
    return found if isinstance(found, int) else 0


class ConfigError(ShardrunError):
    exit_code = 2


class LaunchError(ShardrunError):
    exit_code = 3


class CheckpointError(ShardrunError):
    exit_code = 4


class RefusedError(CheckpointError):
    """Another live job writes the run directory. Another start would be refused too."""


class TrainingError(ShardrunError):
    exit_code = 5


class NotFiniteError(TrainingError):
    """A loss or gradient norm that is NaN or infinite."""


class OneRankError(TrainingError):
    """What only this rank met: it speaks for itself, with its rank in the message."""

    scope = "rank"
