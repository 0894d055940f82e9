"""One checkpoint that all ranks write and the leaders seal, or nothing: the order of a save and of a copy.

    1. rank 0 checks the lock, and whether the step is sealed already
    2. each leader makes an empty staging folder: rank 0 in a shared store, one rank of each node on its disk
    3. every rank writes its files; one that cannot reports it, and nothing is sealed
    4. rank 0 checks the lock again; each leader writes the manifest and gives the folder its name

What a failure has left is deleted. Where it cannot be (an fsync failed after the rename, or the server does
not answer), the checkpoint may exist: the save counts as failed, and the message says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fsdp.base.errors import RefusedError, error_number
from fsdp.checkpoint import inspect
from fsdp.checkpoint.inspect import one_line
from fsdp.checkpoint.manifest import MANIFEST, Broken, data_file
from fsdp.checkpoint.store import Store
from fsdp.distributed.collectives import ObjectGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended, the same on every rank; or why the part of one rank failed."""

    step: int
    path: str = ""
    failure: str = ""
    fatal: bool = False
    """No later save can succeed: another job has the run directory, or the ranks are disconnected."""
    unseen: bool = False
    """Whether the checkpoint exists is unknown."""
    damaged: bool = False
    """What was to be copied is not what was sealed."""
    write_s: float = 0.0
    bytes: int = 0
    ranks: tuple[int, ...] = ()
    """The ranks whose part failed."""
    error_number: int = 0
    """`errno` of the first failure that has one."""
    cause: Exception | None = None
    """The error that ended the save outside of a part, on this rank: as a rule that of a collective."""

    @property
    def verdict(self) -> str:
        if self.path:
            return "is saved, but the run ends"
        return "may NOT be saved" if self.unseen else "was NOT saved"


class Sealing:
    """`leads`: this rank makes and seals the folder of `store`. `shared`: the store behind the nodes' own."""

    def __init__(
        self,
        store: Store,
        group: ObjectGroup,
        attempt: str,
        lock_lost: Callable[[], str | None],
        after_seal: Callable[[SaveOutcome], None],
        *,
        leads: bool,
        shared: Store | None = None,
    ) -> None:
        self.store, self.group = store, group
        self.sealed_path = ""
        """Rank 0: the checkpoint of the last `run` in a shared store, once it is sealed."""
        self._attempt, self._lock_lost, self._after_seal = attempt, lock_lost, after_seal
        self._leads, self._shared = leads, shared or store

    def run(
        self, step: int, write: Callable[[str], Any], finish: Callable[[str, list[Any]], tuple[bytes, int]]
    ) -> SaveOutcome:
        """`write` gets the staging folder and returns this rank's report. `finish` gets all reports on
        rank 0, writes what is left, and returns the manifest and the bytes of all files. Collective.
        """
        self.sealed_path, main = "", self.group.rank == 0
        folder, final = self.store.staging(step, self._attempt), self.store.final(step, self._attempt)
        existing = self.group.broadcast(self._try(partial(self._existing, step)) if main else None)
        if isinstance(existing, SaveOutcome):
            return replace(existing, step=step)
        if existing:
            return SaveOutcome(step, existing)
        failed, sealed, size = self._on_leaders(partial(self.store.begin, folder)), b"", 0
        if failed is None:
            file = f"{self.store.path(folder)}/{data_file(self.group.rank)}"
            reports = self.group.gather(self._try(partial(write, folder), file)) or []
            decided = _merged(reports)
            if main and decided is None:
                decided = self._try(partial(self._finished, finish, folder, reports))
            decided = self.group.broadcast(decided)
            if isinstance(decided, SaveOutcome):
                failed = decided
            else:
                sealed, size = decided
        if failed is not None:
            if not failed.fatal:
                self._on_leaders(partial(self._remove, folder))
            return replace(failed, step=step)
        failed = self._on_leaders(partial(self._seal, folder, final, sealed))
        if failed is not None:
            return replace(failed, step=step)
        outcome = SaveOutcome(step, self.store.path(final), bytes=size)
        self._after_seal(outcome)
        return outcome

    def _existing(self, step: int) -> str:
        """Rank 0: the checkpoint of this step, if there is one: a run that resumes and stops at once saves
        the step that it started from, and that one stays.
        """
        listing = inspect.newest_whole(self._shared, step)
        self._check_lock()
        return "" if listing is None else self._shared.path(listing.folder)

    def _finished(self, finish: Callable[..., tuple[bytes, int]], *arguments: Any) -> tuple[bytes, int]:
        finished = finish(*arguments)
        self._check_lock()
        return finished

    def _check_lock(self) -> None:
        """An attempt that lost its connection for a while must not seal where another job took over."""
        if (why := self._lock_lost()) is not None:
            raise RefusedError(why)

    def _try(self, act: Callable[[], Any], file: str = "") -> Any:
        """What it returns, or its failure: the other ranks wait for it, whatever it is."""
        try:
            return act()
        except Exception as error:
            return self.failure(error, file)

    def _seal(self, folder: str, final: str, sealed: bytes) -> SaveOutcome | None:
        try:
            self.store.write(folder, MANIFEST, [sealed])
            self.store.seal(folder, final)
            if self.group.rank == 0 and self._shared is self.store:
                self.sealed_path = self.store.path(final)
            return None
        except Exception as error:  # the other ranks wait for it, whatever it is
            return replace(self.failure(error), unseen=not self._remove(folder))

    def _remove(self, folder: str) -> bool:
        """Whether the staged folder was there and is deleted."""
        try:
            self.store.remove(folder, self._attempt)
            return True
        except FileNotFoundError:  # it was not made, or has its final name
            return False
        except OSError as error:
            log.warning("%s could not be deleted: %s", self.store.path(folder), one_line(error))
            return False

    def _on_leaders(self, act: Callable[[], Any]) -> SaveOutcome | None:
        """The failures of all leaders, on every rank. Collective."""
        failed: SaveOutcome | None
        failed = self.group.broadcast(_merged(self.group.gather(self._try(act) if self._leads else None)))
        return failed

    def failure(self, error: BaseException, file: str = "") -> SaveOutcome:
        """Of this rank's part."""
        line, fatal, rank = one_line(error, file), isinstance(error, RefusedError), self.group.rank
        return SaveOutcome(
            -1,
            failure=line if fatal else f"rank {rank}: {line}",
            fatal=fatal,
            damaged=isinstance(error, Broken),
            ranks=() if fatal else (rank,),
            error_number=error_number(error),
        )


def _merged(reports: Sequence[Any] | None) -> SaveOutcome | None:
    failures = [report for report in reports or () if isinstance(report, SaveOutcome)]
    if not failures:
        return None
    return SaveOutcome(
        -1,
        failure="; ".join(failure.failure for failure in failures),
        fatal=any(failure.fatal for failure in failures),
        unseen=any(failure.unseen for failure in failures),
        damaged=all(failure.damaged for failure in failures),
        ranks=tuple(rank for failure in failures for rank in failure.ranks),
        error_number=next((failure.error_number for failure in failures if failure.error_number), 0),
    )
