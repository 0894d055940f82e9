"""The faults of a soak: what is done to a run that its launcher keeps alive, from outside.

Each function returns when the fault is over. `ends`: the launcher ends after it, or may; the soak then starts
the same command again, as a person would.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp.base import proc
from tests.support.processes import command_line, pids_with
from tests.torture.starts import LOCAL, MARK, Launched, kill
from tests.torture.surroundings import Surroundings

SHORT_S, LONG_S = 1.0, 8.0
"""How long a fault lasts that passes by itself."""
ENDS_S = 60.0
"""Until a launcher must have ended after a request."""
JUMP_S = 7200


class Unanswered(Exception):
    """The run did not do what it does after a fault."""


class Job(Launched):
    """The run under one launcher."""

    def __init__(
        self, launcher: str, words: Sequence[str], run_dir: Path, log: Path, environ: dict[str, str]
    ) -> None:
        self.launcher, self._run = launcher, run_dir
        super().__init__(words, run_dir, log, environ)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def monitors(self) -> list[int]:
        return [pid for pid in pids_with(f"{MARK}={self._run}") if "fsdp.watch.monitor" in command_line(pid)]

    def ranks(self) -> list[int]:
        """None while they are started, and under torchrun while they import."""
        return [
            pid
            for pid in proc.children(self.pid)
            if proc.is_alive(pid) and "fsdp.watch.monitor" not in command_line(pid)
        ]

    def orphans(self, wait_s: float) -> bool:
        """Whether processes of the run outlive its launcher by so long."""
        late = time.monotonic() + wait_s
        while pids_with(f"{MARK}={self._run}"):
            if time.monotonic() > late:
                return True
            time.sleep(0.1)
        return False

    def until_ended(self, timeout_s: float, what: str) -> None:
        if None in self.codes(timeout_s):
            raise Unanswered(f"{what}: {self.launcher} has not ended within {timeout_s:.0f} s")


Act = Callable[[Job, Surroundings, random.Random], None]


@dataclass(frozen=True)
class Fault:
    name: str
    act: Act
    ends: bool = False
    saves: bool = False
    """The run stops by itself with a checkpoint of its last step."""
    needs: str = ""
    """The field of Surroundings that it breaks."""
    weight: int = 2


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _pause(dice: random.Random) -> None:
    time.sleep(dice.uniform(SHORT_S, LONG_S))


def rank_killed(job: Job, _: Surroundings, dice: random.Random) -> None:
    if ranks := job.ranks():
        kill(dice.choice(ranks))


def launcher_killed(job: Job, _: Surroundings, dice: random.Random) -> None:
    kill(job.pid)


def all_killed(job: Job, _: Surroundings, dice: random.Random) -> None:
    job.kill_now()


def monitor_killed(job: Job, _: Surroundings, dice: random.Random) -> None:
    for pid in job.monitors():
        kill(pid)


def _stopped(pids: Sequence[int], dice: random.Random) -> None:
    """For some seconds."""
    for pid in pids:
        _signal(pid, signal.SIGSTOP)
    _pause(dice)
    for pid in pids:
        _signal(pid, signal.SIGCONT)


def rank_stopped(job: Job, _: Surroundings, dice: random.Random) -> None:
    if ranks := job.ranks():
        _stopped([dice.choice(ranks)], dice)


def monitor_stopped(job: Job, _: Surroundings, dice: random.Random) -> None:
    _stopped(job.monitors(), dice)


def launcher_stopped(job: Job, _: Surroundings, dice: random.Random) -> None:
    _stopped([job.pid], dice)


def rank_hangs(job: Job, _: Surroundings, dice: random.Random) -> None:
    """Stopped until the watch ends it."""
    if not (ranks := job.ranks()):
        return
    victim = dice.choice(ranks)
    born = proc.stat(victim)
    _signal(victim, signal.SIGSTOP)
    late = time.monotonic() + ENDS_S
    while (now := proc.stat(victim)) is not None and born is not None and now.start_ticks == born.start_ticks:
        if not now.alive:
            return
        if time.monotonic() > late:
            _signal(victim, signal.SIGCONT)
            raise Unanswered(f"a rank that stands still was not ended within {ENDS_S:.0f} s")
        time.sleep(0.2)


def terminated(job: Job, _: Surroundings, dice: random.Random) -> None:
    _signal(job.pid, signal.SIGTERM)


def announced(job: Job, _: Surroundings, dice: random.Random) -> None:
    """As a scheduler does: launch.local forwards it, torchrun would die of it, so its ranks receive it."""
    for pid in [job.pid] if job.launcher == LOCAL else job.ranks():
        _signal(pid, signal.SIGUSR1)


def stop_file(job: Job, where: Surroundings, dice: random.Random) -> None:
    (where.outside / "run" / "STOP").touch()


def disk_full(job: Job, where: Surroundings, dice: random.Random) -> None:
    assert where.disk is not None
    where.disk.fill()
    _pause(dice)
    where.disk.free()


def disk_stalls(job: Job, where: Surroundings, dice: random.Random) -> None:
    assert where.disk is not None
    where.disk.freeze()
    try:
        _pause(dice)
    finally:
        where.disk.thaw()


def store_away(job: Job, where: Surroundings, dice: random.Random) -> None:
    assert where.door is not None
    where.door.shut()
    _pause(dice)
    where.door.open()


def clock_jumps(job: Job, where: Surroundings, dice: random.Random) -> None:
    assert where.clock is not None
    where.clock.move(dice.choice([-1, 1]) * dice.randrange(30, JUMP_S))


FAULTS = (
    Fault("a rank killed", rank_killed, weight=6),
    Fault("the launcher killed", launcher_killed, ends=True),
    Fault("everything killed", all_killed, ends=True),
    Fault("the monitor killed", monitor_killed),
    Fault("a rank stopped for seconds", rank_stopped),
    Fault("the monitor stopped for seconds", monitor_stopped, weight=1),
    Fault("the launcher stopped for seconds", launcher_stopped, weight=1),
    Fault("a rank stands still", rank_hangs, weight=1),
    Fault("SIGTERM", terminated, ends=True, saves=True),
    Fault("SIGUSR1", announced, ends=True, saves=True),
    Fault("the stop file", stop_file, ends=True, saves=True),
    Fault("the disk full for seconds", disk_full, ends=True, needs="disk"),
    Fault("the disk stalls for seconds", disk_stalls, needs="disk"),
    Fault("the object store away for seconds", store_away, needs="door"),
    Fault("the clock jumps", clock_jumps, needs="clock"),
)


def possible(where: Surroundings, only: str = "") -> list[Fault]:
    names = [name.strip() for name in only.split(",") if name.strip()]
    return [
        fault
        for fault in FAULTS
        if (not fault.needs or getattr(where, fault.needs) is not None)
        and (not names or any(name in fault.name for name in names))
    ]
