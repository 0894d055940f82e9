"""A run that is killed again and again: starts its ranks, kills them, checks what is left."""

from __future__ import annotations

import json
import math
import os
import random
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fsdp.checkpoint import inspect, load
from fsdp.checkpoint.file_names import MANIFEST, METADATA
from fsdp.checkpoint.local_store import LocalStore
from fsdp.checkpoint.manifest import Manifest
from fsdp.checkpoint.open_store import open_store
from fsdp.checkpoint.store import Store
from tests.torture.changes import Changes
from tests.torture.shapes import CLOSE, EVERY, KEEP, Layout, Shape
from tests.torture.starts import FORKED_RANKS, RAY, SRUN, ForkedRanks, Launchers, Start

MOMENTS = {"anytime": 2, "starting": 1, "saving": 3, "sealing": 3, "pruning": 3}
"""When to kill, and how often each: most lie within a save."""
OBJECT_MOMENTS = {"anytime": 2, "starting": 1, "saving": 6}
"""A listing shows no more: objects are sealed and pruned without a change of name."""
LATER_S = {"saving": 0.05, "sealing": 0.004, "pruning": 0.004}
OBJECTS_LATER_S = 0.5
"""The kill comes up to so much later than the sign of its moment."""
OBJECT_LOOK_S = 0.03
"""Between two listings, each some milliseconds of the server's processor time."""
LOOK_S = 0.002
TOO_LONG_S = 900.0
"""A Ray with a fifteenth of a processor has taken five minutes to its ranks."""


class Violation(Exception):
    """A violated guarantee; the run directory is kept for inspection."""


@dataclass
class Reference:
    """The uninterrupted run: each step's loss, each saved step's digests, the exported model."""

    losses: dict[int, float]
    digests: dict[int, dict[str, tuple[int, str]]]
    model: int
    run: Chain | None = None
    """With its checkpoints, for a run that is compared within CLOSE."""


@dataclass
class Death:
    moment: str
    launcher: str
    victim: str
    reached: int
    sealed: int


class Chain:
    """One run directory, started again and again with the same flags."""

    def __init__(
        self,
        shape: Shape,
        folder: Path,
        keep: int = KEEP,
        bucket: str = "",
        *,
        launchers: Launchers | None = None,
        data: Path | None = None,
    ) -> None:
        self.shape, self.folder = shape, folder
        self.run_dir, self.starts = folder / "run", 0
        self._launchers = launchers or Launchers([f"{name}: not asked for" for name in (RAY, SRUN)])
        place = f"{bucket}/{folder.name}" if shape.objects else str(self.run_dir / "checkpoints")
        self.store = open_store(place)
        self.flags = [
            "--run.dir", str(self.run_dir), *(flag.format(run=folder, data=data) for flag in shape.flags),
            "--train.steps", str(shape.steps), "--train.global_batch", "16",
            "--checkpoint.every_steps", str(EVERY), "--checkpoint.keep_last", str(keep),
            *shape.layout.flags,
            *(["--checkpoint.dir", place] if shape.objects else []),
            *(["--checkpoint.local_dir", str(folder / "local")] if shape.local else []),
        ]  # fmt: skip
        self._checked: set[tuple[object, ...]] = set()
        folder.mkdir(parents=True)

    # ---- living and dying

    def start(self, launcher: str = FORKED_RANKS, layout: Layout | None = None) -> Start:
        """`layout`: another one than that of the flags."""
        self.starts += 1
        layout, log = layout or self.shape.layout, self.folder / "log"
        flags = [*self.flags, *(layout.flags if layout != self.shape.layout else [])]
        if launcher == FORKED_RANKS:
            return ForkedRanks(layout.ranks, flags, self.folder / f"store-{self.starts}", log)
        return self._launchers.start(
            launcher, layout, flags, self.run_dir, log=log, one_node=self.shape.local
        )

    def live(self, timeout_s: float = TOO_LONG_S) -> None:
        """Runs to the end, without a kill."""
        start = self.start()
        codes = start.codes(timeout_s)
        start.kill_all()
        if any(codes) or None in codes:
            raise Violation(
                f"{self.run_dir}: a run without kills exited with {codes}; its log is {self.folder / 'log'}"
            )

    def die_at(self, step: int) -> int:
        """Starts, kills all ranks when this step is recorded; returns the last recorded step."""
        start = self.start()
        while self.reached() < step and not start.any_ended():
            time.sleep(LOOK_S)
        start.kill_all()
        return self.reached()

    def die(self, dice: random.Random) -> Death | None:
        """Starts and kills the run at a random moment; None if it ended before that."""
        moments = OBJECT_MOMENTS if self.shape.objects and not self.shape.local else MOMENTS
        moment = dice.choices(list(moments), list(moments.values()))[0]
        launchers = self._launchers.weights(objects=self.shape.objects)
        launcher = dice.choices(list(launchers), list(launchers.values()))[0]
        start = self.start(launcher, dice.choice(self.shape.layouts))
        try:
            came = self._await(moment, dice, start)
        except BaseException:
            start.kill_all()
            raise
        victim = start.kill(dice)
        if not came and (self.run_dir / "DONE").exists():
            return None
        return Death(moment, launcher, victim, self.reached(), self.newest_sealed())

    def _await(self, moment: str, dice: random.Random, start: Start) -> bool:
        """True at the moment; False if a rank has ended before it."""
        at_random = {"anytime": dice.uniform(0, 4), "starting": dice.uniform(0, 1)}.get(moment)
        late = time.monotonic() + (at_random or TOO_LONG_S)
        saves_to_let_pass, last = dice.randrange(4), ""
        with closing(Changes()) as changes:
            while (now := time.monotonic()) < late:
                if start.any_ended():
                    return False
                wait_s = late - now
                if at_random is None:
                    seen = self._signs(moment, changes)
                    if seen and seen != last:
                        last = seen
                        saves_to_let_pass -= 1
                    if saves_to_let_pass < 0:
                        later_s = OBJECTS_LATER_S if self.shape.objects else LATER_S[moment]
                        time.sleep(dice.uniform(0, later_s))
                        return True
                    wait_s = OBJECT_LOOK_S if self._lists_objects else wait_s
                changes.wait(wait_s, start.ends)
        if at_random is None:
            raise Violation(
                f"{self.run_dir}: no {moment} within {TOO_LONG_S:.0f} s; its log is {self.folder / 'log'}"
            )
        return True

    @property
    def _lists_objects(self) -> bool:
        return not isinstance(self.stores()[-1], LocalStore)

    def _signs(self, moment: str, changes: Changes) -> str:
        """The folder that marks the moment; empty if there is none. Later ones end a wait for changes."""
        store = self.stores()[-1]
        if not isinstance(store, LocalStore):
            changes.watch([self.folder / "local"])
            return self._object_signs() if moment == "saving" else ""
        changes.watch([self.folder, self.run_dir, store.root.parent, store.root])
        names = _names(store.root)
        staged = [name for name in names if ".tmp-" in name]
        if moment == "saving":
            return staged[0] if staged else ""
        if moment == "sealing":
            changes.watch(store.root / name for name in staged)
            signs = (METADATA, MANIFEST)
            return next(
                (name for name in staged if any((store.root / name / sign).exists() for sign in signs)),
                "",
            )
        if moment == "pruning":
            gone = [name for name in names if ".gone-" in name]
            finals = [name for name in names if "." not in name]
            return gone[0] if gone else (finals[-1] if len(finals) > KEEP else "")
        return ""

    def _object_signs(self) -> str:
        """The first folder without a manifest: one request to the server, some milliseconds."""
        return next((folder for folder in sorted(self.store.folders()) if ".tmp-" in folder), "")

    # ---- looking

    def records(self, key: str) -> Iterator[tuple[int, float]]:
        file = self.run_dir / "metrics.jsonl"
        for line in file.read_text().splitlines(keepends=True) if file.exists() else ():
            if line.endswith("\n") and key in (record := json.loads(line)):
                yield record["step"], record[key]

    def reached(self) -> int:
        return max((step for step, _ in self.records("loss")), default=0)

    def stores(self) -> list[Store]:
        """The shared one, and the node's own if there is one."""
        local = self.folder / "local"
        return [self.store, *(LocalStore(place) for place in (local.iterdir() if local.exists() else ()))]

    def newest_sealed(self) -> int:
        return max(
            (
                found.step
                for store in self.stores()
                for found in inspect.scan(store)
                if found.manifest is not None
            ),
            default=0,
        )

    def check_death(self, death: Death, reference: Reference) -> None:
        """Each checkpoint is whole and of one step; the newest is at most one save behind."""
        begun = max(0, death.reached - 1) // EVERY * EVERY  # a step is recorded before its own save begins
        if death.sealed < begun - EVERY:
            raise Violation(
                f"{self.run_dir}: at step {death.reached} the newest sealed was {death.sealed}, every {EVERY}"
            )
        for store in self.stores():
            for found in inspect.scan(store):
                if found.manifest is not None:
                    self._check_if_new(store, found.folder, found.manifest, reference)
                elif MANIFEST in store.sizes(found.folder):
                    raise Violation(f"{self.run_dir}: {found.folder} is sealed and not whole: {found.detail}")

    def _check_if_new(self, store: Store, folder: str, about: Manifest, reference: Reference) -> None:
        """A folder whose files are those of an earlier check, unchanged since, is not read again."""
        files = _files(store.root / folder) if isinstance(store, LocalStore) else None
        seen = (store.where, folder, files)
        if files is None or seen not in self._checked:
            self._check_one(store, folder, about, reference)
            self._checked.add(seen)

    def _check_one(self, store: Store, folder: str, about: Manifest, reference: Reference) -> None:
        """Every byte is as sealed, every tensor equals the uninterrupted run's at that step."""
        for file, (size, crc) in about.files.items():
            inspect.check_file(store, folder, file, size, crc)
        source = load.open_one(store, folder, about)
        if reference.run is not None:
            other = reference.run.source(about.step)
            same = set(about.digests) == set(reference.digests[about.step]) and all(
                _close(load.whole(source, key), load.whole(other, key)) for key in about.digests
            )
        else:
            same = dict(about.digests) == reference.digests[about.step]
            for key in about.digests:
                load.whole(source, key)
        if not same:
            raise Violation(f"{self.run_dir}: {folder} is not the state of step {about.step}")

    def source(self, step: int) -> load.CheckpointSource:
        """The checkpoint of this step."""
        found = inspect.sealed_step(self.store, step)
        assert found is not None
        return load.open_one(self.store, found.folder, found.manifest)

    def check_end(self, reference: Reference) -> None:
        """The losses, each step once, and the model are those of the uninterrupted run."""
        losses = list(self.records("loss"))
        close = reference.run is not None
        wrong = [step for step, loss in losses if not _same(loss, reference.losses.get(step), close)]
        if wrong or [step for step, _ in losses] != sorted(reference.losses):
            raise Violation(
                f"{self.run_dir}: the losses of steps {wrong[:5]} differ from the uninterrupted run's, or a "
                f"step is missing or there twice: {len(losses)} records of {len(reference.losses)} steps"
            )
        if reference.run is not None:
            mine, whole = self._full_model(), reference.run._full_model()
            same = mine.keys() == whole.keys() and all(_close(mine[name], whole[name]) for name in whole)
        else:
            same = self.model() == reference.model
        if not same:
            raise Violation(f"{self.run_dir}: full_model differs from the uninterrupted run's")

    def model(self) -> int:
        """A checksum of every exported file, of full_model and of full_model_ema."""
        crc = 0
        for file in sorted(self.run_dir.glob("full_model*/**/*")):
            if file.is_file():
                crc = zlib.crc32(file.read_bytes(), zlib.crc32(file.name.encode(), crc))
        return crc

    def _full_model(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = torch.load(
            self.run_dir / "full_model" / "full-model.pt", weights_only=True
        )
        return state

    def read(self) -> Reference:
        founds = inspect.scan(self.store)
        digests = {found.step: dict(found.manifest.digests) for found in founds if found.manifest is not None}
        losses, close = dict(self.records("loss")), bool(self.shape.others)
        return Reference(losses, digests, self.model(), self if close else None)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(folder))
    except FileNotFoundError:
        return []


def _files(folder: Path) -> tuple[object, ...]:
    """What changes with any write to its files."""
    found = ((entry.name, entry.stat()) for entry in os.scandir(folder))
    return tuple(
        sorted((name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in found)
    )


def _close(ours: Tensor, theirs: Tensor) -> bool:
    if not ours.is_floating_point():
        return torch.equal(ours, theirs)
    return ours.dtype == theirs.dtype and torch.allclose(ours, theirs, rtol=CLOSE, atol=CLOSE)


def _same(ours: float, theirs: float | None, close: bool) -> bool:
    if theirs is None or not close:
        return ours == theirs
    return math.isclose(ours, theirs, rel_tol=CLOSE, abs_tol=CLOSE)
