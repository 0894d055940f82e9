"""One long run that its launchers keep alive through faults of all kinds, and its unbroken twin:

    python -m tests.torture.soak --place FOLDER --hours 1.5 --every 60 --record bench/results/soak.json
    python -m tests.torture.soak --place FOLDER --record bench/results/soak.json
                              continues it after any interruption, with what it began with

The run is under launch.local or torchrun with their own restarts; what ends the launcher, ends it, and the
same command is started again, under one or the other. Faults come at random times, one in --every seconds on
average: tests/torture/faults.py. At the end the losses of all steps and the model equal those of a run that
nothing happened to, bit for bit; the processes and the run directory have not grown over the restarts; every
record can be read, and the report opens.

Steps are paced, so that --hours is about the time of the run, and other work may run beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdp.rundir import line_files
from tests.support.processes import pids_with
from tests.support.resumable import newest_sealed
from tests.torture import faults, growth, soak_page
from tests.torture.chain import Chain, Violation
from tests.torture.faults import Fault, Job, Unanswered, possible
from tests.torture.over import over_at_a_signal
from tests.torture.record import Record
from tests.torture.shapes import SMALL, Shape
from tests.torture.starts import LOCAL, MARK, ROOT, TORCHRUN, kill, launch_local, torchrun
from tests.torture.surroundings import Surroundings, surroundings

RANKS, BATCH, EVERY = 2, 16, 50
PACE_S = 0.1
"""Of a step that nothing disturbs; faults take about a third more."""
TRIES = "100000"
HANG_S = 20
STANDS_STILL_S = 600.0
"""Without a new step, and without a fault that explains it."""
SETTLED_STEPS = 100
"""Steps of a start after which its processes are measured."""
ORPHANS_S = 5.0
"""Ranks may outlive their launcher so long: torchrun's train on without it, and hold the run's lock."""
LOOK_S = 0.1


@dataclass
class Plan:
    """What a soak is, in the file that it is continued from."""

    seed: int
    every: float
    steps: int
    pace_s: float
    only: str
    objects: bool
    disk: bool
    sittings: int = 0

    @property
    def mib(self) -> int:
        """Room for the checkpoints, and for the records of all steps."""
        return 96 + self.steps // 300


class Soak:
    def __init__(self, plan: Plan, where: Surroundings, record: Record, over: threading.Event) -> None:
        self.plan, self.where, self.record, self.over = plan, where, record, over
        self.dice = random.Random(f"{plan.seed} {plan.sittings}")
        self.faults = possible(where, plan.only)
        self.log = where.folder / "log"
        self.job: Job | None = None
        self.last: Fault | None = None
        self.began_at = 0
        """The newest step at this job's start."""

    @property
    def run(self) -> Path:
        """For this process."""
        return self.where.outside / "run"

    def flags(self) -> list[str]:
        """As typed by a person, at every start the same."""
        own = [
            "--run.dir", str(self.where.inside / "run"), *SMALL,
            "--data.name", "tests.torture.paced:digits", "--data.args.seconds", str(self.plan.pace_s),
            "--train.steps", str(self.plan.steps), "--train.global_batch", str(BATCH),
            "--checkpoint.every_steps", str(EVERY), "--run.full_records", "0",
            "--watch.hang_s", str(HANG_S),
        ]  # fmt: skip
        if not self.plan.objects:
            return own
        local = ["--checkpoint.local_dir", str(self.where.inside / "local")]
        return [*own, "--checkpoint.dir", f"{self.where.bucket}/run", *local]

    # ------------------------------------------------------------ the run

    def live(self) -> bool:
        """True at the end of the run, False if this sitting is over before it."""
        while not (self.run / "DONE").exists():
            if self.over.is_set():
                return False
            self._start()
            try:
                self._accompany()
            finally:
                assert self.job is not None
                self._note_end(self.job)
                self.job.kill_all()
        return True

    def _start(self) -> None:
        launcher = self.dice.choice([LOCAL, TORCHRUN])
        words = (
            launch_local(RANKS, "--restarts", TRIES)
            if launcher == LOCAL
            else torchrun(RANKS, f"--max-restarts={TRIES}")
        )
        self.last, self.began_at = None, self.step()
        run = self.where.inside / "run"
        self.job = Job(
            launcher, [*self.where.enter, *words, *self.flags()], run, self.log, self.where.environ
        )
        self.record.count(launchers=launcher)

    def _accompany(self) -> None:
        """Until the launcher has ended: a fault, and the next one."""
        job = self.job
        assert job is not None
        while not job.any_ended():
            late = time.monotonic() + self.dice.expovariate(1 / self.plan.every)
            while time.monotonic() < late and not job.any_ended() and not self.over.is_set():
                time.sleep(LOOK_S)
            if self.over.is_set():
                return self._stop(job)
            if not job.any_ended():
                self._break(job)
        return None

    def _stop(self, job: Job) -> None:
        """This sitting's end: as a person stops a run."""
        self.last = next(one for one in faults.FAULTS if one.name == "SIGTERM")
        faults.terminated(job, self.where, self.dice)
        job.until_ended(faults.ENDS_S, "at the end of this sitting")

    def _break(self, job: Job) -> None:
        self._measure(job)
        fault = self.dice.choices(self.faults, [one.weight for one in self.faults])[0]
        if fault.saves:  # a start that has not trained yet would remove the file, or die of the signal
            self._until_it_continues(job, self.began_at, fault)
        if job.any_ended() or self.over.is_set():
            return
        self.last, before = fault, self.step()
        print(f"step {before}, {job.launcher}: {fault.name}", flush=True)
        fault.act(job, self.where, self.dice)
        self.record.count(faults=fault.name)
        self.record.set(step=before)
        if fault.saves:
            job.until_ended(faults.ENDS_S, fault.name)
            self._check_saved(fault)
        elif fault.ends:
            job.codes(faults.ENDS_S if fault.name.endswith("killed") else 0)
        else:
            self._until_it_continues(job, before, fault)

    def _check_saved(self, fault: Fault) -> None:
        """A stop on request loses no step: one that had trained at all has sealed its last one."""
        stopped, step = self.run / "STOPPED", self.step()
        if stopped.exists() and step > self.began_at and self._sealed() != step:
            self._violated(f"{fault.name}: step {step} was trained, the newest sealed is {self._sealed()}")

    def _until_it_continues(self, job: Job, before: int, fault: Fault) -> None:
        late = time.monotonic() + STANDS_STILL_S
        while self.step() <= before and not job.any_ended() and not self.over.is_set():
            if time.monotonic() > late:
                self._violated(f"{fault.name}: no step after {before} within {STANDS_STILL_S:.0f} s")
                return job.kill_now()
            time.sleep(LOOK_S)
        return None

    def _note_end(self, job: Job) -> None:
        """Whether the launcher's end has a reason; what outlives it is killed, and counted."""
        if job.code is None:
            return
        after = self.last.name if self.last is not None else "nothing"
        self.record.count(ends=f"{job.launcher} with {job.code} after {after}")
        if job.orphans(ORPHANS_S):
            self.record.count(orphans=f"{job.launcher} after {after}")
        expected = (self.run / "DONE").exists() or (self.last is not None and self.last.ends)
        if not expected and "no restart" not in self._said():
            self._violated(f"{job.launcher} ended with {job.code} after {after}, at step {self.step()}")

    def _said(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
            return file.read().decode(errors="replace")

    def _violated(self, text: str) -> None:
        print(f"VIOLATION: {text}", file=sys.stderr, flush=True)
        self.record.violation(text)

    # ------------------------------------------------------------ looking

    def step(self) -> int:
        """The last recorded one."""
        return last_step(self.run / "metrics.jsonl")

    def starts(self) -> int:
        events = line_files.read_records(self.run / "history.jsonl")
        return sum(event["event"] == "start" for event in events)

    def _sealed(self) -> int:
        if not self.plan.objects:
            return newest_sealed(self.run)
        places = (self.where.outside / "local").iterdir()
        return max((newest_in(place) for place in places), default=0)

    def _measure(self, job: Job) -> None:
        """Processes that have trained for a while, and the run directory."""
        self.where.keep_name()
        starts, step = self.starts(), self.step()
        # began_at: a launcher that has just begun has not recorded its start yet
        begun = max(self._from_step(), self.began_at)
        if step - begun < min(SETTLED_STEPS, self.plan.steps // 10):
            return
        roles = {"launcher": [job.pid], "rank": job.ranks(), "monitor": job.monitors()}
        found = [growth.of_process(role, pid, starts, step) for role, pids in roles.items() for pid in pids]
        growth.append(self.where.folder / "samples.jsonl", [*found, growth.of_run(self.run, starts, step)])

    def _from_step(self) -> int:
        """Of the newest start."""
        events = line_files.read_records(self.run / "history.jsonl")
        return max((event["from_step"] for event in events if event["event"] == "start"), default=0)

    # ------------------------------------------------------------ the end

    def check(self) -> None:
        """The whole run against its twin; Violation at the first difference."""
        shape = Shape("fsdp", RANKS, self.plan.steps, what="soak", flags=SMALL)
        twin = Chain(shape, self.where.folder / f"twin-{self.plan.sittings}", keep=1)
        twin.flags += ["--checkpoint.every_steps", "0", "--run.full_records", "0"]
        twin.flags += ["--data.name", "tests.torture.paced:digits"]
        twin.live(600 + 0.1 * self.plan.steps)
        broken = Chain(shape, self.where.folder / f"broken-{self.plan.sittings}")
        broken.run_dir = self.run
        broken.check_end(twin.read())
        torn = [
            f"{name}: {sum(one is None for one in line_files.read_lines(self.run / name))} torn lines"
            for name in ("metrics.jsonl", "history.jsonl", "saves.jsonl")
            if None in line_files.read_lines(self.run / name)
        ]
        grown = growth.grown(growth.read(self.where.folder / "samples.jsonl"))
        for text in growth.too_much(grown):
            self._violated(text)
        page = self.where.folder / "report.html"
        command = [sys.executable, "-m", "fsdp.report", str(self.where.inside / "run"), "--out", str(page)]
        report = subprocess.run(
            [*self.where.enter, *command],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        if report.returncode or "</html>" not in page.read_text(encoding="utf-8"):
            raise Violation(f"python -m fsdp.report ended with {report.returncode}: {report.stderr[-500:]}")
        self.record.set(restarts=self.starts() - 1, grown=[str(one) for one in grown], torn=torn, finished=1)


def newest_in(store: Path) -> int:
    """As newest_sealed, in this folder."""
    steps = (folder.name.removeprefix("step-") for folder in store.glob("step-*"))
    return max((int(step) for step in steps if step.isdigit()), default=0)


def last_step(file: Path) -> int:
    """Of the last whole line with a loss; 0 before the first."""
    if not file.exists():
        return 0
    with file.open("rb") as lines:
        lines.seek(max(0, lines.seek(0, os.SEEK_END) - 8000))
        tail = lines.read().splitlines(keepends=True)
    for line in reversed(tail):
        if line.endswith(b"\n") and line.startswith(b"{") and b'"loss"' in line:
            return int(json.loads(line)["step"])
    return 0


# ---------------------------------------------------------------- the command


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    place = Path(options.place).resolve()
    place.mkdir(parents=True, exist_ok=True)
    _end_leftovers(place)
    file = place / "soak.json"
    mib = Plan(**json.loads(file.read_text())).mib if file.exists() else _first_plan(options).mib
    over = over_at_a_signal(options.seconds)
    with surroundings(place, mib) as where:
        plan = Plan(**json.loads(file.read_text())) if file.exists() else _first_plan(options, where)
        if reason := _lacks(plan, where):
            print(f"this soak began with {reason}, which is not here: {where.left_out}", file=sys.stderr)
            return 2
        plan.sittings += 1
        file.write_text(json.dumps(asdict(plan)))
        record = Record(
            Path(options.record) if options.record else None,
            soak_page.page,
            seed=plan.seed,
            every=plan.every,
            steps=plan.steps,
            left_out=where.left_out,
            finished=0,
            step=0,
        )
        print(f"seed {plan.seed}: {plan.steps} steps, a fault in {plan.every:g} s, in {place}", flush=True)
        soak = Soak(plan, where, record, over)
        try:
            if soak.live():
                soak.check()
            else:
                print(f"continue it with: python -m tests.torture.soak --place {place}")
        except (Unanswered, Violation) as error:
            record.violation(str(error))
        record.set(step=soak.step())
        record.write()
    print(soak_page.summary([record.sitting]))
    return 1 if record.sitting["violations"] else 0


def _first_plan(options: argparse.Namespace, where: Surroundings | None = None) -> Plan:
    return Plan(
        seed=options.seed,
        every=options.every,
        steps=options.steps or int(options.hours * 3600 / (PACE_S * 4 / 3)),
        pace_s=options.pace,
        only=options.only,
        objects=where is not None and where.door is not None,
        disk=where is not None and where.disk is not None,
    )


def _lacks(plan: Plan, where: Surroundings) -> str:
    if plan.objects and where.door is None:
        return "an object store"
    return "a disk of its own" if plan.disk and where.disk is None else ""


def _end_leftovers(place: Path) -> None:
    """Processes of an earlier sitting of this soak that was killed: they have its folder."""
    marks = [f"{MARK}={folder / 'run'}" for folder in (place, place / "disk")]
    while left := [pid for mark in marks for pid in pids_with(mark)]:
        for pid in left:
            kill(pid)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--place", required=True, help="folder of the soak; one that began is continued")
    parser.add_argument("--hours", type=float, default=1.0, help="of the run, about")
    parser.add_argument("--steps", type=int, default=0, help="in place of --hours")
    parser.add_argument("--pace", type=float, default=PACE_S, help="seconds that a step waits for its data")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two faults, on average")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 30))
    parser.add_argument("--seconds", type=float, default=0, help="of this sitting, at most; 0: to the end")
    parser.add_argument("--only", default="", help="faults whose names contain one of these, with commas")
    parser.add_argument("--record", default="", help="JSON file that this sitting is added to")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
