"""A run that is killed again and again: starts its ranks, kills them, checks what is left."""

from __future__ import annotations

import json
import os
import random
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fsdp.checkpoint import inspect, load
from fsdp.checkpoint.file_names import MANIFEST, METADATA
from fsdp.checkpoint.local_store import LocalStore
from fsdp.checkpoint.manifest import Manifest
from fsdp.checkpoint.open_store import open_store
from fsdp.checkpoint.store import Store
from tests.torture.starts import FORKED_RANKS, LAUNCHERS, ForkedRanks, Launched, Start

STEPS, EVERY, KEEP = 150, 5, 2
MOMENTS = {"anytime": 2, "starting": 1, "saving": 3, "sealing": 3, "pruning": 3}
"""When to kill, and how often each: most lie within a save."""
OBJECT_MOMENTS = {"anytime": 2, "starting": 1, "saving": 6}
"""A listing shows no more: objects are sealed and pruned without a change of name."""
LOOK_S = 0.0005
TOO_LONG_S = 120.0


class Violation(Exception):
    """A violated guarantee; the run directory is kept for inspection."""


@dataclass(frozen=True)
class Shape:
    strategy: str
    ranks: int
    steps: int = STEPS
    objects: bool = False
    """Checkpoints in an object store, else in the run directory."""
    local: bool = False
    """Sealed in --checkpoint.local_dir first."""

    @property
    def name(self) -> str:
        return f"{self.strategy}-{self.ranks}-{self.steps}"


@dataclass
class Reference:
    """The uninterrupted run: each step's loss, each saved step's digests, the exported model."""

    losses: dict[int, float]
    digests: dict[int, dict[str, tuple[int, str]]]
    model: int


@dataclass
class Death:
    moment: str
    launcher: str
    victim: str
    reached: int
    sealed: int


class Chain:
    """One run directory, started again and again with the same flags."""

    def __init__(self, shape: Shape, folder: Path, keep: int = KEEP, bucket: str = "") -> None:
        self.shape, self.folder = shape, folder
        self.run_dir, self.starts = folder / "run", 0
        replicate = ["--mesh.replicate", "2"] if shape.strategy == "hsdp" else []
        place = f"{bucket}/{folder.name}" if shape.objects else str(self.run_dir / "checkpoints")
        self.store = open_store(place)
        self.flags = [
            "--run.dir", str(self.run_dir), "--model.name", "mlp", "--data.name", "digits",
            "--mesh.strategy", shape.strategy, "--train.steps", str(shape.steps),
            "--train.global_batch", "16",
            "--checkpoint.every_steps", str(EVERY), "--checkpoint.keep_last", str(keep), *replicate,
            *(["--checkpoint.dir", place] if shape.objects else []),
            *(["--checkpoint.local_dir", str(folder / "local")] if shape.local else []),
        ]  # fmt: skip
        folder.mkdir(parents=True)

    # ---- living and dying

    def start(self, launcher: str = FORKED_RANKS) -> Start:
        self.starts += 1
        log = self.folder / "log"
        if launcher != FORKED_RANKS:
            return Launched(launcher, self.shape.ranks, self.flags, self.run_dir, log)
        return ForkedRanks(self.shape.ranks, self.flags, self.folder / f"store-{self.starts}", log)

    def live(self, launcher: str = FORKED_RANKS) -> None:
        """Runs to the end, without a kill."""
        codes = self.start(launcher).codes(TOO_LONG_S)
        if any(codes):
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
        moments = OBJECT_MOMENTS if self.shape.objects else MOMENTS
        moment = dice.choices(list(moments), list(moments.values()))[0]
        launcher = dice.choices(list(LAUNCHERS), list(LAUNCHERS.values()))[0]
        start = self.start(launcher)
        came = self._await(moment, dice, start)
        victim = start.kill(dice)
        if not came and (self.run_dir / "DONE").exists():
            return None
        return Death(moment, launcher, victim, self.reached(), self.newest_sealed())

    def _await(self, moment: str, dice: random.Random, start: Start) -> bool:
        """True at the moment; False if a rank has ended before it."""
        late = time.monotonic() + {"anytime": dice.uniform(0, 4), "starting": dice.uniform(0, 1)}.get(
            moment, TOO_LONG_S
        )
        saves_to_let_pass, last = dice.randrange(4), ""
        while time.monotonic() < late:
            if start.any_ended():
                return False
            seen = self._signs(moment)
            if seen and seen != last:
                last = seen
                saves_to_let_pass -= 1
                if saves_to_let_pass < 0:
                    time.sleep(dice.uniform(0, 0.05 if moment == "saving" else 0.004))
                    return True
            time.sleep(LOOK_S)
        if moment not in ("anytime", "starting"):
            raise Violation(
                f"{self.run_dir}: no {moment} within {TOO_LONG_S:.0f} s; its log is {self.folder / 'log'}"
            )
        return True

    def _signs(self, moment: str) -> str:
        """The folder that marks the moment; empty if there is none."""
        store = self.stores()[-1]
        if not isinstance(store, LocalStore):
            return self._object_signs() if moment == "saving" else ""
        try:
            names = sorted(entry.name for entry in os.scandir(store.root))
        except FileNotFoundError:
            return ""
        staged = [name for name in names if ".tmp-" in name]
        if moment == "saving":
            return staged[0] if staged else ""
        if moment == "sealing":
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
                    self._check_one(store, found.folder, found.manifest, reference)
                elif MANIFEST in store.sizes(found.folder):
                    raise Violation(f"{self.run_dir}: {found.folder} is sealed and not whole: {found.detail}")

    def _check_one(self, store: Store, folder: str, about: Manifest, reference: Reference) -> None:
        """Every byte is as sealed, every tensor equals the uninterrupted run's at that step bit for bit."""
        for file, (size, crc) in about.files.items():
            inspect.check_file(store, folder, file, size, crc)
        if dict(about.digests) != reference.digests[about.step]:
            raise Violation(f"{self.run_dir}: {folder} is not the state of step {about.step}")
        source = load.open_one(store, folder, about)
        for key in about.digests:
            load.whole(source, key)

    def check_end(self, reference: Reference) -> None:
        """The losses, each step once, and the model are those of the uninterrupted run."""
        losses = list(self.records("loss"))
        if losses != sorted(reference.losses.items()):
            wrong = [step for step, loss in losses if reference.losses.get(step) != loss]
            raise Violation(
                f"{self.run_dir}: the losses of steps {wrong[:5]} differ from the uninterrupted run's"
            )
        if self.model() != reference.model:
            raise Violation(f"{self.run_dir}: full_model differs from the uninterrupted run's")

    def model(self) -> int:
        return zlib.crc32((self.run_dir / "full_model" / "full-model.pt").read_bytes())

    def read(self) -> Reference:
        founds = inspect.scan(self.store)
        digests = {found.step: dict(found.manifest.digests) for found in founds if found.manifest is not None}
        return Reference(dict(self.records("loss")), digests, self.model())
