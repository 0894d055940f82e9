"""A save that is sealed on each node's own disk: --checkpoint.local_dir.

Every rank writes its file to its node's folder. When all have, the same manifest is written and the folder is
renamed on every node; the manifest names the files of all nodes. `.metadata`, whose size grows with the
ranks, is on rank 0's node alone. A step counts once every node has sealed it. Then older local folders are
deleted, but for one that is being copied, and the copier receives the new one. A seal that failed after the
rename counts, with a warning, and nothing older is deleted until a later save succeeds. Plan, copy and
writing are those of saver.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fsdp.base.errors import error_number
from fsdp.checkpoint import file_names, inspect, manifest
from fsdp.checkpoint.copier import Copier
from fsdp.checkpoint.local_store import LocalStore
from fsdp.checkpoint.manifest import Broken
from fsdp.checkpoint.rank_file import StagingMemory, Written
from fsdp.checkpoint.saver import PartFailure, SaveJob, SaveOutcome, Saver, failed, one_line
from fsdp.checkpoint.store import Store
from fsdp.dist.collectives import ObjectGroup

log = logging.getLogger(__name__)


class LocalSaver(Saver):
    """`leads`: this rank makes and seals its node's folder."""

    def __init__(
        self,
        shared: Store,
        local: LocalStore,
        group: ObjectGroup,
        device: torch.device,
        attempt: str,
        lock_lost: Callable[[], str | None],
        copier: Copier,
        *,
        leads: bool,
        memory: StagingMemory | None = None,
    ) -> None:
        self._shared, self._local, self._copier, self._leads = shared, local, copier, leads
        super().__init__(local, group, device, attempt, lock_lost, lambda: None, memory)

    def _begin(self, job: SaveJob) -> tuple[str, SaveOutcome | None]:
        folder = self._local.staging(job.step, self._attempt)
        why = self._on_leader(lambda: self._local.begin(folder))
        refused: SaveOutcome | None = None
        failures = self._failures(why)
        if self._group.rank == 0:
            refused = self._refusal(job) or (failed(job.step, failures) if failures else None)
        refused = self._group.broadcast(refused)
        if refused is not None:
            self._remove_staged(folder)
        return folder, refused

    def _refusal(self, job: SaveJob) -> SaveOutcome | None:
        """Rank 0: the outcome of a save that needs or gets none."""
        try:
            if (why := self._lock_lost()) is not None:
                return SaveOutcome(job.step, "", why, fatal=True)
            if (whole := inspect.sealed_step(self._shared, job.step)) is not None:
                return SaveOutcome(job.step, self._shared.path(whole.folder))
        except Exception as error:  # the other ranks wait for it, whatever it is
            return failed(job.step, [self._part_failure(error)])
        return None

    def _end(self, job: SaveJob, folder: str, reports: list[Written | PartFailure] | None) -> SaveOutcome:
        failures = [one for one in reports or [] if isinstance(one, PartFailure)]
        sealed, lost = self._sealed(job, reports, failures)
        final = self._local.final(job.step, self._attempt)
        doubts: list[PartFailure] = []
        if sealed is None:
            self._remove_staged(folder)
        else:
            contents, about, _ = sealed
            why = self._on_leader(lambda: self._seal_here(folder, final, contents, about))
            there = why is not None and self._is_sealed_here(folder, final)
            failures += self._failures(None if there else why)
            doubts = self._failures(why if there else None)
        outcome: SaveOutcome | None = None
        keep: set[str] = set()
        if self._group.rank == 0:
            total = 0 if sealed is None else sealed[2]
            doubt = "; ".join(map(str, doubts))
            outcome = SaveOutcome(job.step, self._local.path(final), doubt=doubt, bytes=total)
            outcome = failed(job.step, failures) if failures else outcome
            outcome = SaveOutcome(job.step, "", lost, fatal=True) if lost else outcome
            keep = set() if outcome.failure else self._copier.next(final)
        outcome, keep = self._group.broadcast((outcome, keep))
        assert outcome is not None
        if not outcome.failure:
            if not outcome.doubt:  # a power cut may still lose it
                self._prune_here(keep)
            self._copier.put()
        return outcome

    def _sealed(
        self, job: SaveJob, reports: list[Written | PartFailure] | None, failures: list[PartFailure]
    ) -> tuple[Any, str]:
        """What `_contents` returns (its files on rank 0 alone), or None if a rank failed, and who took the
        lock. Collective.
        """
        sealed, lost = None, ""
        if reports is not None and not failures:
            try:
                lost = self._lock_lost() or ""
                written = [one for one in reports if isinstance(one, Written)]
                self._compare_buffers(written)
                sealed = None if lost else self._contents(job, written)
            except Exception as error:  # the other ranks wait for it, whatever it is
                failures.append(self._part_failure(error))
        contents, about, total = sealed or ({}, b"", 0)
        about, lost = self._group.broadcast((about, lost))
        return (contents, about, total) if about else None, lost

    def _seal_here(self, folder: str, final: str, contents: Mapping[str, bytes], about: bytes) -> None:
        for file, data in contents.items():
            self._local.write(folder, file, [data])
        self._local.write(folder, file_names.MANIFEST, [about])
        if final in self._local.folders():  # of an earlier start, which not every node sealed
            self._local.remove(final, self._attempt)
        self._local.seal(folder, final)

    def _is_sealed_here(self, folder: str, final: str) -> bool:
        """Whether this node has the checkpoint after its seal failed; if not, what was written is deleted.

        An fsync may fail after the rename.
        """
        try:
            if manifest.decode(self._local.read(final, file_names.MANIFEST)).attempt == self._attempt:
                return True
        except (FileNotFoundError, Broken):
            pass
        except OSError as error:  # it may be there: nothing is deleted
            log.warning("%s cannot be read: %s", self._local.path(final), error)
            return False
        self._remove_staged(folder)
        return False

    def _remove_staged(self, folder: str) -> None:
        """On the leader: deletes what a save that failed has written, if it has made its folder."""
        if not self._leads:
            return
        try:
            self._local.remove(folder, self._attempt)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("%s could not be deleted: %s", self._local.path(folder), error)

    def _prune_here(self, keep: set[str]) -> None:
        """Deletes this node's other sealed folders: every node has sealed the newest."""
        if not self._leads:
            return
        for folder in inspect.finals(self._local):
            if folder not in keep:
                try:
                    self._local.remove(folder, self._attempt)
                except OSError as error:
                    log.warning("%s could not be deleted: %s", self._local.path(folder), error)

    def _on_leader(self, act: Callable[[], None]) -> PartFailure | None:
        if not self._leads:
            return None
        try:
            act()
        except Exception as error:  # the other ranks wait for it, whatever it is
            return PartFailure(self._group.rank, one_line(error, self._local.where), error_number(error))
        return None

    def _failures(self, mine: PartFailure | None) -> list[PartFailure]:
        """Those of all nodes, on rank 0. Collective."""
        return [one for one in self._group.gather(mine) or [] if one is not None]
