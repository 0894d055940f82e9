"""A run that is killed again and again: starts its ranks, kills them, checks what is left."""

from __future__ import annotations

import json
import math
import os
import random
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fsdp.checkpoint import inspect, restore
from fsdp.checkpoint.manifest import MANIFEST, METADATA, Manifest
from fsdp.checkpoint.store import LocalStore, Store, open_store
from tests.golden.configurations import Configuration
from tests.golden.starts import FORKED_RANKS, ForkedRanks, Launchers, Start

EVERY, KEEP = 5, 2
MOMENTS = {"anytime": 2, "starting": 1, "saving": 3, "sealing": 3, "pruning": 3}
"""When to kill, and how often each: most lie within a save."""
OBJECT_MOMENTS = {"anytime": 2, "starting": 1, "saving": 6}
"""A listing shows no more: objects are sealed and pruned without a change of name."""
LATER_S = {"saving": 0.05, "sealing": 0.004, "pruning": 0.004}
OBJECTS_LATER_S = 0.5
"""The kill comes up to so much later than the sign of its moment."""
LOOK_S, OBJECT_LOOK_S = 0.001, 0.03
"""Between two listings; one of objects takes some milliseconds of the server's processor time."""
TOO_LONG_S = 900.0
"""A Ray with a fifteenth of a processor has taken five minutes to its ranks."""
CLOSE = 1e-12
"""The largest difference of a loss or a parameter, as a part of itself or, below 1, of 1."""


def wide(strategy: str, ranks: int) -> Configuration:
    """An MLP of 800,000 parameters on digits."""
    more = " --mesh.replicate 2" if strategy == "hsdp" else ""
    return Configuration(
        strategy, ranks, f"--model.name mlp --data.name digits --mesh.strategy {strategy}{more}"
    )


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
        configuration: Configuration,
        folder: Path,
        steps: int,
        *,
        keep: int = KEEP,
        bucket: str = "",
        local: bool = False,
        data: Path = Path(),
        launchers: Launchers | None = None,
    ) -> None:
        """`bucket`: checkpoints in an object store. `local`: sealed in --checkpoint.local_dir first."""
        self.configuration, self.folder, self._objects, self._local = configuration, folder, bucket, local
        self.run_dir, self.starts = folder / "run", 0
        self._launchers = launchers or Launchers()
        checkpoints = f"{bucket}/{folder.name}" if bucket else str(self.run_dir / "checkpoints")
        self.store = open_store(checkpoints)
        self.flags = [
            "--run.dir", str(self.run_dir), *configuration.words(folder, data),
            "--train.steps", str(steps), "--train.global_batch", "12",
            "--checkpoint.every_steps", str(EVERY), "--checkpoint.keep_last", str(keep),
            *(["--checkpoint.dir", checkpoints] if bucket else []),
            *(["--checkpoint.local_dir", str(folder / "local")] if local else []),
        ]  # fmt: skip
        self._checked: set[tuple[object, ...]] = set()
        folder.mkdir(parents=True)

    # ---- living and dying

    def start(self, launcher: str = FORKED_RANKS, other: tuple[int, str] | None = None) -> Start:
        """`other`: ranks and flags in place of the configuration's."""
        self.starts += 1
        ranks, more = other or (self.configuration.ranks, "")
        flags, log = [*self.flags, *more.split()], self.folder / "log"
        if launcher == FORKED_RANKS:
            return ForkedRanks(ranks, flags, self.folder / f"store-{self.starts}", log)
        return self._launchers.start(launcher, ranks, flags, self.run_dir, log, nodes=1 if self._local else 2)

    def live(self, launcher: str = FORKED_RANKS, other: tuple[int, str] | None = None) -> None:
        """Runs to the end, without a kill."""
        start = self.start(launcher, other)
        codes = start.codes(TOO_LONG_S)
        start.kill_all()
        if any(codes) or None in codes:
            raise Violation(f"{self.run_dir}: a run without kills exited with {codes}; {self.folder / 'log'}")

    def die_at(self, step: int, other: tuple[int, str] | None = None) -> int:
        """Starts, kills all ranks when this step is recorded; returns the last recorded step."""
        start = self.start(other=other)
        while self.reached() < step and not start.any_ended():
            time.sleep(LOOK_S)
        start.kill_all()
        return self.reached()

    def die(
        self, dice: random.Random, launcher: str = FORKED_RANKS, moments: Mapping[str, int] = MOMENTS
    ) -> Death | None:
        """Starts and kills the run at a random moment; None if it ended before that."""
        moments = OBJECT_MOMENTS if self._objects and not self._local else moments
        moment = dice.choices(list(moments), list(moments.values()))[0]
        start = self.start(launcher, dice.choice([None, *self.configuration.others]))
        try:
            came = self._wait_for(moment, dice, start)
        except BaseException:
            start.kill_all()
            raise
        victim = start.kill(dice)
        if not came and (self.run_dir / "DONE").exists():
            return None
        return Death(moment, launcher, victim, self.reached(), self.newest_sealed())

    def _wait_for(self, moment: str, dice: random.Random, start: Start) -> bool:
        """True at the moment; False if a rank has ended before it."""
        limit_s = {"anytime": dice.uniform(0, 4), "starting": dice.uniform(0, 1)}.get(moment, TOO_LONG_S)
        late, saves_to_let_pass, last = time.monotonic() + limit_s, dice.randrange(4), ""
        while time.monotonic() < late:
            if start.any_ended():
                return False
            sign = self._sign(moment)
            if sign and sign != last:
                last, saves_to_let_pass = sign, saves_to_let_pass - 1
            if saves_to_let_pass < 0:
                time.sleep(dice.uniform(0, OBJECTS_LATER_S if self._objects else LATER_S[moment]))
                return True
            time.sleep(LOOK_S if isinstance(self.stores()[-1], LocalStore) else OBJECT_LOOK_S)
        if limit_s == TOO_LONG_S:
            raise Violation(f"{self.run_dir}: no {moment} within {limit_s:.0f} s; {self.folder / 'log'}")
        return True

    def _sign(self, moment: str) -> str:
        """The folder that marks the moment; empty if there is none."""
        store = self.stores()[-1]
        if moment not in LATER_S:
            return ""
        if not isinstance(store, LocalStore):
            return next((folder for folder in sorted(store.folders()) if ".tmp-" in folder), "")
        names = sorted(path.name for path in store.root.iterdir()) if store.root.exists() else []
        staged = [name for name in names if ".tmp-" in name]
        if moment == "sealing":
            signs = (METADATA, MANIFEST)
            staged = [name for name in staged if any((store.root / name / sign).exists() for sign in signs)]
        if moment == "pruning":
            sealed = [name for name in names if "." not in name]
            staged = [name for name in names if ".gone-" in name] or sealed[-1:] * (len(sealed) > KEEP)
        return staged[0] if staged else ""

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
        return [self.store, *(LocalStore(folder) for folder in (local.iterdir() if local.exists() else ()))]

    def newest_sealed(self) -> int:
        entries = [entry for store in self.stores() for entry in inspect.scan(store)]
        return max((entry.step for entry in entries if entry.manifest is not None), default=0)

    def check_death(self, death: Death, reference: Reference) -> None:
        """Each checkpoint is whole and of one step; the newest is at most one save behind."""
        begun = max(0, death.reached - 1) // EVERY * EVERY  # a step is recorded before its own save begins
        if death.sealed < begun - EVERY:
            raise Violation(
                f"{self.run_dir}: at step {death.reached} the newest sealed was {death.sealed}, every {EVERY}"
            )
        for store in self.stores():
            for entry in inspect.scan(store):
                if entry.manifest is not None:
                    self._check_if_new(store, entry.folder, entry.manifest, reference)
                elif MANIFEST in store.sizes(entry.folder):
                    raise Violation(f"{self.run_dir}: {entry.folder} is sealed and not whole: {entry.detail}")

    def _check_if_new(self, store: Store, folder: str, manifest: Manifest, reference: Reference) -> None:
        """A folder whose files are those of an earlier check, unchanged since, is not read again."""
        files = _files(store.root / folder) if isinstance(store, LocalStore) else None
        key = (store.where, folder, files)
        if files is None or key not in self._checked:
            self._check(store, folder, manifest, reference)
            self._checked.add(key)

    def _check(self, store: Store, folder: str, manifest: Manifest, reference: Reference) -> None:
        """Every byte is as sealed, every tensor equals the uninterrupted run's at that step."""
        for file, (size, crc) in manifest.files.items():
            inspect.check_file(store, folder, file, size, crc)
        source = inspect.open_source(store, folder, manifest)
        tensors = {key: restore.whole(source, key) for key in manifest.digests}
        digests = reference.digests[manifest.step]
        if reference.run is not None:
            other = reference.run.source(manifest.step)
            same = tensors.keys() == digests.keys() and all(
                _close(tensor, restore.whole(other, key)) for key, tensor in tensors.items()
            )
        else:
            same = dict(manifest.digests) == digests
        if not same:
            raise Violation(f"{self.run_dir}: {folder} is not the state of step {manifest.step}")

    def source(self, step: int) -> inspect.CheckpointSource:
        """The checkpoint of this step."""
        sealed = inspect.newest_whole(self.store, step)
        assert sealed is not None
        return inspect.open_source(self.store, sealed.folder, sealed.manifest)

    def check_end(self, reference: Reference) -> None:
        """The losses, each step once, and the model are those of the uninterrupted run."""
        losses, tolerance = list(self.records("loss")), CLOSE if reference.run else 0.0
        wrong = [
            step
            for step, loss in losses
            if not math.isclose(
                loss, reference.losses.get(step, math.inf), rel_tol=tolerance, abs_tol=tolerance
            )
        ]
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
        file = self.run_dir / "full_model" / "full-model.pt"
        state: dict[str, Tensor] = torch.load(file, weights_only=True)
        return state

    def read(self) -> Reference:
        entries = inspect.scan(self.store)
        digests = {entry.step: dict(entry.manifest.digests) for entry in entries if entry.manifest}
        return Reference(
            dict(self.records("loss")), digests, self.model(), self if self.configuration.others else None
        )


def _files(folder: Path) -> tuple[object, ...]:
    """What changes with any write to its files."""
    stats = ((entry.name, entry.stat()) for entry in os.scandir(folder))
    return tuple(
        sorted((name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats)
    )


def _close(ours: Tensor, theirs: Tensor) -> bool:
    if not ours.is_floating_point():
        return torch.equal(ours, theirs)
    return ours.dtype == theirs.dtype and torch.allclose(ours, theirs, rtol=CLOSE, atol=CLOSE)
