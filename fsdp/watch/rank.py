"""A rank's side of the watch: its page, its witness, the wrapped collectives, and one monitor a node.

    with Watch(config.watch, env, run.path) as watch:
        phases.listen(watch.phase)

Building one costs a collective and, on each node's first rank, the start of a small process. Leaving by an
exception hands the rank's last words to the monitor, who tells the first failure of all; told(error) then
waits for that, and says whether it came.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from fsdp.base.phases import ACTIVITIES
from fsdp.config import WatchSection
from fsdp.dist import collectives
from fsdp.dist.env import DistEnv, meeting_address
from fsdp.dist.stop import LAST_ACTS, SIGNALS
from fsdp.rundir.lock import here
from fsdp.watch import status_page
from fsdp.watch.collective_calls import Calls
from fsdp.watch.cuda_timing import device_clock
from fsdp.watch.failure_report import last_words
from fsdp.watch.last_process import wait_until_told, wake
from fsdp.watch.monitor_options import Orders
from fsdp.watch.responder import Responder
from fsdp.watch.status_page import FAILED, OVER, PID, STATE, THREAD, Cells, Writer

ROOT = Path(__file__).resolve().parents[2]
FAREWELL_S = 2.0


class Watch:
    """Entering is collective. With --watch.enabled false it does nothing."""

    def __init__(self, section: WatchSection, env: DistEnv, run: Path) -> None:
        self._section, self._env, self._run = section, env, run
        self._cells: Cells | None = None
        self._monitor: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Watch:
        if not self._section.enabled or not Path("/proc/self/task").is_dir():
            return self  # other systems than Linux show nothing to look at
        sweep()
        self._cells = own = status_page.create(
            f"shardrun-{_space()}-{os.getpid()}-{secrets.token_hex(4)}.cells"
        )
        own.numbers[PID], own.numbers[THREAD] = os.getpid(), threading.get_native_id()
        own.numbers[status_page.CUDA] = self._env.device.type == "cuda"
        self._writer = Writer(own.numbers)
        self._witness = Responder(own.path)
        self._start_monitor(own.path)
        self._calls = Calls(self._writer)
        self._device = device_clock(self._writer) if own.numbers[status_page.CUDA] else None
        LAST_ACTS.append(self._over)
        ACTIVITIES.listener = self._writer.activity
        return self

    def phase(self, name: str, step: int) -> None:
        """A listener of fsdp/base/phases.py."""
        if self._cells is not None:
            self._writer.phase(name, step)
            if self._device is not None:
                self._device.phase(name, step)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cells is None:
            return
        LAST_ACTS.remove(self._over)
        ACTIVITIES.listener = None
        self._calls.close()
        if self._device is not None:
            self._device.close()
        if isinstance(error, Exception):
            self._hand_over(error)
        else:
            self._writer.phase("end", int(self._cells.numbers[status_page.STEP]))
            self._cells.numbers[STATE] = OVER if error is None else FAILED
        self._witness.close()
        if self._monitor is not None:
            self._let_go(self._monitor, error is None)
        if not hasattr(error, "told"):
            self._cells.path.unlink(missing_ok=True)  # where no monitor came to take the name away
            self._cells.close()
        self._cells = None

    # ------------------------------------------------------------ the end

    def _over(self) -> None:
        """At a second Ctrl-C the process is gone in a moment: nobody needs to wonder why."""
        if self._cells is not None:
            self._cells.numbers[STATE] = OVER

    def _hand_over(self, error: Exception) -> None:
        assert self._cells is not None
        words = last_words(error, self._env)
        self._cells.tell(words)
        tell_torchrun(words)
        self._cells.numbers[STATE] = FAILED
        if self._env.launcher != "ray":  # whose driver tells its ranks' failures itself
            error.told = self._cells  # type: ignore[attr-defined]

    def _let_go(self, monitor: subprocess.Popen[bytes], well: bool) -> None:
        """It ends with its ranks. After a failure it has more to do than this rank may wait for."""
        assert monitor.stdin is not None
        monitor.stdin.close()
        wake(monitor.pid)
        if well:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for storage, and ends by itself
                monitor.wait(FAREWELL_S)

    # ------------------------------------------------------------ the beginning

    def _start_monitor(self, path: Path) -> None:
        spread = self._env.local_world_size < self._env.world_size
        ear = _listen() if spread and self._env.is_main else None
        mine = here("").place or socket.gethostname()
        told = collectives.everyones((mine, socket.gethostname(), str(path), _meeting(ear)))
        places = list(dict.fromkeys(place for place, _, _, _ in told))
        of_place = {place: [rank for rank, one in enumerate(told) if one[0] == place] for place in places}
        if self._env.rank == of_place[mine][0]:
            names = _node_names(places, {place: host for place, host, _, _ in told})
            meeting = told[0][3] if len(places) > 1 else None
            orders = Orders(
                node=names[mine],
                run=str(self._run),
                ranks={rank: told[rank][2] for rank in of_place[mine]},
                nodes={names[place]: ranks for place, ranks in of_place.items()},
                hang_s=self._section.hang_s,
                late_percent=self._section.late_percent,
                token=meeting[0] if meeting else "",
                head=self._env.is_main,
                ear=ear.fileno() if ear is not None and meeting is not None else -1,
                addresses=tuple(meeting[1]) if meeting and not self._env.is_main else (),
                tells_failures=self._env.launcher != "ray",
            )
            self._monitor = _spawn(orders)
        if ear is not None:
            ear.close()


def _space() -> int:
    """Processes of which space the numbers in a name mean."""
    return Path("/proc/self/ns/pid").stat().st_ino


def sweep() -> None:
    """Ranks that were killed together with their monitor have left names behind: those of dead processes go."""
    for one in status_page.folder().glob(f"shardrun-{_space()}-*"):
        number = one.name.split("-")[2]
        if number.isdigit() and not Path(f"/proc/{number}").exists():
            with contextlib.suppress(OSError):  # another's, or gone already
                one.unlink()


def _listen() -> socket.socket:
    ear = socket.socket()
    ear.bind(("", 0))
    ear.listen(128)
    return ear


def _meeting(ear: socket.socket | None) -> tuple[str, list[tuple[str, int]]] | None:
    """A word that only this run's monitors know, and where the head may be reached."""
    if ear is None:
        return None
    hosts = dict.fromkeys([meeting_address(), socket.gethostname()])
    return secrets.token_hex(8), [(host, ear.getsockname()[1]) for host in hosts if host]


def _node_names(places: list[str], hosts: dict[str, str]) -> dict[str, str]:
    """Host names; two process spaces of one host are told apart."""
    names: dict[str, str] = {}
    for place in places:
        name, number = hosts[place], 2
        while name in names.values():
            name, number = f"{hosts[place]}-{number}", number + 1
        names[place] = name
    return names


def _spawn(orders: Orders) -> subprocess.Popen[bytes]:
    """Without site-packages: it needs none, and is there in 50 ms."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = json.dumps(asdict(orders))
    return subprocess.Popen(
        [sys.executable, "-S", "-m", "fsdp.watch.monitor", words],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=_screen(),
        env=environ,
        pass_fds=(orders.ear,) if orders.ear >= 0 else (),
        cwd="/",
    )


def _screen() -> int | None:
    """Where this process's errors are read: under Ray a file that the driver follows, which is not descriptor
    2.
    """
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return None


def tell_torchrun(words: dict[str, Any]) -> None:
    """Its own summary, the last thing on the screen, then shows the first failure's line and not `error_file:
    <N/A>`.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        line = "another rank ended first" if words["secondary"] else words["message"]
        # whole seconds, and of two equal ones torchrun takes the lower rank's: an echo comes after its cause
        extra = {"py_callstack": line, "timestamp": str(int(words["time"]) + words["secondary"])}
        with contextlib.suppress(OSError):  # the failure itself has been told
            Path(file).write_text(
                json.dumps({"message": {"message": line, "extraInfo": extra}}), encoding="utf-8"
            )


def told(error: Exception) -> bool:
    """Has the monitor printed what happened? It knows what came first, and who only fell after it. The last
    thing that a rank asks before its process ends: a launcher that ends the other ranks does not interrupt it
    any more.
    """
    left: Cells | None = getattr(error, "told", None)
    if left is None:
        return False
    with contextlib.suppress(ValueError):  # not on the main thread: nobody listens
        for one in SIGNALS:
            signal.signal(one, signal.SIG_IGN)
    said = wait_until_told(left)
    left.path.unlink(missing_ok=True)
    left.close()
    return said
