"""A run that is killed again and again: starts its ranks, kills them, checks what is left."""

from __future__ import annotations

import json
import os
import random
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from fsdp.checkpoint import inspect, load
from fsdp.checkpoint.file_names import MANIFEST, METADATA
from fsdp.checkpoint.local_store import LocalStore
from fsdp.checkpoint.manifest import Manifest
from tests.support.forked import FORKED
from tests.torture import rank as rank_module

STEPS, EVERY, KEEP = 150, 5, 2
MOMENTS = {"anytime": 2, "starting": 1, "saving": 3, "sealing": 3, "pruning": 3}
"""When to kill, and how often each: most lie within a save."""
LOOK_S = 0.0005
TOO_LONG_S = 120.0


class Violation(Exception):
    """A violated guarantee; the run directory is kept for inspection."""


@dataclass(frozen=True)
class Shape:
    strategy: str
    ranks: int


@dataclass
class Reference:
    """The uninterrupted run: each step's loss, each saved step's digests, the exported model."""

    losses: dict[int, float]
    digests: dict[int, dict[str, tuple[int, str]]]
    model: int


@dataclass
class Death:
    moment: str
    victim: str
    reached: int
    sealed: int


class Chain:
    """One run directory, started again and again with the same flags."""

    def __init__(self, shape: Shape, folder: Path, keep: int = KEEP, steps: int = STEPS) -> None:
        self.shape, self.folder = shape, folder
        self.run_dir, self.starts = folder / "run", 0
        self.store = LocalStore(self.run_dir / "checkpoints")
        replicate = ["--mesh.replicate", "2"] if shape.strategy == "hsdp" else []
        self.flags = [
            "--run.dir", str(self.run_dir), "--model.name", "mlp", "--data.name", "digits",
            "--mesh.strategy", shape.strategy, "--train.steps", str(steps), "--train.global_batch", "16",
            "--checkpoint.every_steps", str(EVERY), "--checkpoint.keep_last", str(keep), *replicate,
        ]  # fmt: skip
        folder.mkdir(parents=True)

    # ---- living and dying

    def start(self) -> list[BaseProcess]:
        self.starts += 1
        store, log = str(self.folder / f"store-{self.starts}"), str(self.folder / "log")
        ranks = [
            FORKED.Process(
                target=rank_module.run, args=(rank, self.shape.ranks, self.flags, store, log), daemon=True
            )
            for rank in range(self.shape.ranks)
        ]
        for rank in ranks:
            rank.start()
        return list(ranks)

    def live(self) -> None:
        """Runs to the end, without a kill."""
        ranks = self.start()
        for rank in ranks:
            rank.join(TOO_LONG_S)
        codes = [rank.exitcode for rank in ranks]
        if codes != [0] * len(codes):
            raise Violation(
                f"{self.run_dir}: a run without kills exited with {codes}; its log is {self.folder / 'log'}"
            )

    def die_at(self, step: int) -> int:
        """Starts, kills all ranks when this step is recorded; returns the last recorded step."""
        ranks = self.start()
        while self.reached() < step and all(rank.exitcode is None for rank in ranks):
            time.sleep(LOOK_S)
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join()
        return self.reached()

    def die(self, dice: random.Random) -> Death | None:
        """Starts and kills the run at a random moment; None if it ended before that."""
        moment = dice.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        ranks = self.start()
        came = self._await(moment, dice, ranks)
        victim = self._kill(ranks, dice)
        if not came and (self.run_dir / "DONE").exists():
            return None
        return Death(moment, victim, self.reached(), self.newest_sealed())

    def _await(self, moment: str, dice: random.Random, ranks: list[BaseProcess]) -> bool:
        """True at the moment; False if a rank has ended before it."""
        late = time.monotonic() + {"anytime": dice.uniform(0, 4), "starting": dice.uniform(0, 1)}.get(
            moment, TOO_LONG_S
        )
        saves_to_let_pass, last = dice.randrange(4), ""
        while time.monotonic() < late:
            if any(rank.exitcode is not None for rank in ranks):
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
        try:
            names = sorted(entry.name for entry in os.scandir(self.store.root))
        except FileNotFoundError:
            return ""
        staged = [name for name in names if ".tmp-" in name]
        if moment == "saving":
            return staged[0] if staged else ""
        if moment == "sealing":
            signs = (METADATA, MANIFEST)
            return next(
                (name for name in staged if any((self.store.root / name / sign).exists() for sign in signs)),
                "",
            )
        if moment == "pruning":
            gone = [name for name in names if ".gone-" in name]
            finals = [name for name in names if "." not in name]
            return gone[0] if gone else (finals[-1] if len(finals) > KEEP else "")
        return ""

    def _kill(self, ranks: list[BaseProcess], dice: random.Random) -> str:
        """Kills all ranks at once, as a power cut does, or one rank and the others up to 3 s later."""
        chosen = dice.choice(["all", *range(len(ranks))])
        for nth, rank in enumerate(ranks):
            if chosen in ("all", nth):
                rank.kill()
        for rank in ranks:
            rank.join(0 if chosen == "all" else dice.uniform(0, 3))
        for rank in ranks:
            rank.kill()
            rank.join()
        return "all ranks" if chosen == "all" else f"rank {chosen}"

    # ---- looking

    def records(self, key: str) -> Iterator[tuple[int, float]]:
        file = self.run_dir / "metrics.jsonl"
        for line in file.read_text().splitlines(keepends=True) if file.exists() else ():
            if line.endswith("\n") and key in (record := json.loads(line)):
                yield record["step"], record[key]

    def reached(self) -> int:
        return max((step for step, _ in self.records("loss")), default=0)

    def newest_sealed(self) -> int:
        return max(
            (found.step for found in inspect.scan(self.store) if found.manifest is not None), default=0
        )

    def check_death(self, death: Death, reference: Reference) -> None:
        """Each checkpoint is whole and of one step; the newest is at most one save behind."""
        begun = max(0, death.reached - 1) // EVERY * EVERY  # a step is recorded before its own save begins
        if death.sealed < begun - EVERY:
            raise Violation(
                f"{self.run_dir}: at step {death.reached} the newest sealed was {death.sealed}, every {EVERY}"
            )
        for found in inspect.scan(self.store):
            if found.manifest is not None:
                self._check_one(found.folder, found.manifest, reference)
            elif MANIFEST in self.store.sizes(found.folder):
                raise Violation(f"{self.run_dir}: {found.folder} is sealed and not whole: {found.detail}")

    def _check_one(self, folder: str, about: Manifest, reference: Reference) -> None:
        """Every byte is as sealed, every tensor equals the uninterrupted run's at that step bit for bit."""
        for file, (size, crc) in about.files.items():
            inspect.check_file(self.store, folder, file, size, crc)
        if dict(about.digests) != reference.digests[about.step]:
            raise Violation(f"{self.run_dir}: {folder} is not the state of step {about.step}")
        source = load.open_one(self.store, folder, about)
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
