"""The error classes: each names who can correct the cause, and carries a HINT line and an exit code.

ConfigError: the user's flags. LaunchError: the launcher. CheckpointError: the storage. TrainingError: the
numbers. Further exit codes: 6, memory ran out (fsdp/memory/oom.py); 7, the watch ended the rank
(fsdp/watch/observe.py).
"""

from __future__ import annotations

from typing import Literal

from fsdp.base.text import as_typed, printable_line

Scope = Literal["all", "node", "rank"]


class ShardrunError(Exception):
    """One line that names the field, the value or the rank, and a HINT that works as typed."""

    exit_code = 1
    verdict = "exception"
    """The kind of its verdict (fsdp/watch)."""
    scope: Scope = "all"
    """Which ranks raise it: all (rank 0 prints it), the ranks of one node, or one rank alone."""

    ranks: tuple[int, ...] = ()
    """The ranks at fault, where all ranks raise it and these are known."""
    error_number: int = 0
    """`errno` of the operating system's error behind it, such as errno.ENOSPC; 0 if there is none."""

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        *,
        scope: Scope | None = None,
        ranks: tuple[int, ...] = (),
        error_number: int = 0,
    ) -> None:
        if scope is not None:
            self.scope = scope
        self.hint, self.ranks, self.error_number = hint, ranks, error_number
        super().__init__(self.printed(as_typed(f"{message} HINT: {hint}" if hint else message)))

    def printed(self, text: str) -> str:
        """Messages name files and values that others wrote: none of them begins a line of its own."""
        return printable_line(text)


def error_number(error: BaseException) -> int:
    """`errno` of an OSError, or of the OSError behind one of ours; 0 if there is none."""
    found = error.error_number if isinstance(error, ShardrunError) else getattr(error, "errno", None)
    return found if isinstance(found, int) else 0


def one_line(error: BaseException) -> str:
    """The error's class and message without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def message_line(error: BaseException, most: int = 200) -> str:
    """The message alone without line breaks and its full stop, cut; the class where there is no message."""
    return " ".join(str(error).split())[:most].rstrip(".") or type(error).__name__


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of the message, cut; the class where there is no message."""
    lines = (line.strip()[:most] for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


def exception_line(error: BaseException, most: int = 2000) -> str:
    """`ValueError: what happened`: the class and the first line of its message that is not empty, cut.

    Of an error that a worker of a DataLoader has sent, the last line: the first names the worker alone.
    """
    text = str(error)
    if text.startswith("Caught ") and " in DataLoader worker process " in text:
        return text.rstrip().rpartition("\n")[2][:most]
    line, name = first_line(error, most), type(error).__name__
    return line if line == name else f"{name}: {line}"


def without_hint(error: BaseException) -> str:
    """The message up to its HINT."""
    return str(error).partition(" HINT: ")[0]


class ConfigError(ShardrunError):
    exit_code, verdict = 2, "config"


class LaunchError(ShardrunError):
    exit_code, verdict = 3, "launcher"


class CheckpointError(ShardrunError):
    exit_code, verdict = 4, "checkpoint"


class RefusedError(CheckpointError):
    """Another live job holds the run directory. Another start would be refused too."""


class TrainingError(ShardrunError):
    exit_code, verdict = 5, "training"


class NotFiniteError(TrainingError):
    """A loss or gradient norm that is NaN or infinite."""

    verdict = "nan"


class OneRankError(TrainingError):
    """An error that only this rank has: this rank prints it, with its number in the message."""

    scope = "rank"


class OtherRankFailed(TrainingError):
    """Another rank failed and prints its error; this rank ends with the same exit code."""

    def __init__(self, rank: int, message: str, exit_code: int) -> None:
        super().__init__(f"rank {rank} failed: {message}")
        self.exit_code = exit_code
