"""A rank's side of the watch: its status page, its responder, and the monitor of its node.

    with Watch(config.watch, env, run.path) as watch:
        phases.listen(watch.phase)

Entering costs one collective, on several nodes two, and on each node's first rank the start of the monitor
process, which a thread starts again if it was killed. Leaving by an exception hands the rank's failure report
to the monitor, which prints the first failure of all ranks; failure_was_printed(error) in failure.py then
waits for that.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from fsdp.base import proc
from fsdp.base.phases import ACTIVITIES, SIGNALS, delayed
from fsdp.config import WatchSection
from fsdp.dist import collectives
from fsdp.dist.addresses import address_towards, is_loopback
from fsdp.dist.env import DistEnv, rendezvous_host
from fsdp.dist.stop import LAST_ACTS
from fsdp.rundir.lock import this_place
from fsdp.watch import status_page
from fsdp.watch.counters import CollectiveCounter, DeviceClock
from fsdp.watch.failure import failure_report, wake, write_torchrun_error_file
from fsdp.watch.responder import Responder
from fsdp.watch.status_page import FAILED, LEFT, OVER, PID, STATE, THREAD, StatusPage, Writer

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
MONITOR_END_S = 2.0
STARTED_S = 5.0
"""A monitor that ends sooner is not started again."""


class Watch:
    """Entering is collective. With --watch.enabled false it does nothing.

    `process_ends`: after a failure too, unlike a notebook. The monitor then ends a process that has failed
    and does not end.
    """

    def __init__(self, section: WatchSection, env: DistEnv, run: Path, *, process_ends: bool = False) -> None:
        self._section, self._env, self._run = section, env, run
        self._process_ends = process_ends
        self._page: StatusPage | None = None
        self._monitor: MonitorProcess | None = None
        self._listener: socket.socket | None = None

    def __enter__(self) -> Watch:
        if not self._section.enabled:
            return self
        try:
            self._page = self._observable()
        except OSError as error:
            log.warning("watch: this rank is not watched (%s)", error)
        self._start_monitor()
        if self._page is None:
            return self
        numbers = self._page.numbers
        self._writer = Writer(numbers)
        self._calls = CollectiveCounter(self._writer)
        self._device = DeviceClock(self._writer).wrap() if numbers[status_page.CUDA] else None
        LAST_ACTS.append(self._mark_over)
        ACTIVITIES.listener = self._writer.activity
        return self

    def _observable(self) -> StatusPage:
        """This rank's page and responder. OSError where a monitor could not observe it."""
        if not proc.shows_this_process():
            raise OSError("/proc is of another PID namespace")
        remove_stale_names()
        page = status_page.create(f"shardrun-{_pid_namespace()}-{os.getpid()}-{secrets.token_hex(4)}.page")
        page.numbers[PID], page.numbers[THREAD] = os.getpid(), threading.get_native_id()
        page.numbers[status_page.CUDA] = self._env.device.type == "cuda"
        try:
            self._responder = Responder(page.path, self._env.device)
        except OSError:
            page.path.unlink()
            raise
        return page

    def phase(self, name: str, step: int) -> None:
        """A listener of fsdp/base/phases.py."""
        if self._page is not None:
            self._writer.phase(name, step)
            if self._device is not None:
                self._device.phase(name, step)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._page is None:
            return
        LAST_ACTS.remove(self._mark_over)
        ACTIVITIES.listener = None
        self._calls.close()
        if self._device is not None:
            self._device.close()
        # a model's file may call sys.exit("pip install …"), and asyncio's CancelledError is no Exception
        if error is not None and not isinstance(error, KeyboardInterrupt):
            self._report(error)
        else:
            self._writer.phase("end", int(self._page.numbers[status_page.STEP]))
            self._page.numbers[STATE] = FAILED if error is not None and self._process_ends else OVER
        self._responder.close()
        if self._listener is not None:
            self._listener.close()
        if self._monitor is not None:
            self._monitor.leave(wait_s=MONITOR_END_S if error is None else 0.0)
        if not hasattr(error, "status_page"):
            self._page.path.unlink(missing_ok=True)  # in case no monitor has started, which removes the name
            self._page.close()
        self._page = None

    def _mark_over(self) -> None:
        """At a second Ctrl-C the process ends at once, which is no fault."""
        if self._page is not None:
            self._page.numbers[STATE] = OVER

    def _report(self, error: BaseException) -> None:
        assert self._page is not None
        failure = failure_report(error, self._env)
        self._page.write_failure(failure)
        line = "another rank ended first" if failure["secondary"] else failure["message"]
        write_torchrun_error_file(line, secondary=failure["secondary"])
        self._page.numbers[STATE] = FAILED if self._process_ends else LEFT
        # Ray's driver prints its ranks' failures itself
        if self._env.launcher != "ray" and self._process_ends:
            error.status_page = self._page  # type: ignore[attr-defined]

    def _start_monitor(self) -> None:
        """Collective: also of ranks without a page, which no monitor observes."""
        place = this_place() or socket.gethostname()
        path = "" if self._page is None else str(self._page.path)
        towards = address_towards(rendezvous_host())
        everyone = collectives.all_gather_objects((place, socket.gethostname(), path, towards))
        by_place: dict[str, list[int]] = {}
        for rank, (its_place, _, _, _) in enumerate(everyone):
            by_place.setdefault(its_place, []).append(rank)
        head, token = None, ""
        if len(by_place) > 1:
            if self._env.is_main and path:
                self._listener = _listener([towards for other, _, _, towards in everyone if other != place])
                if self._listener is not None:
                    head, token = self._listener.getsockname()[:2], secrets.token_hex(16)
            head, token = collectives.broadcast_object((head, token))
        pages = {rank: everyone[rank][2] for rank in by_place[place] if everyone[rank][2]}
        if self._env.rank != next(iter(pages), None):
            return
        names = _node_names(list(by_place), {its_place: host for its_place, host, _, _ in everyone})
        options = {
            "node": names[place],
            "run": str(self._run),
            "ranks": pages,
            "nodes": {names[its_place]: ranks for its_place, ranks in by_place.items()},
            "hang_s": self._section.hang_s,
            "late_percent": self._section.late_percent,
            "launcher": self._env.launcher,
            "token": token,
            "listener": self._listener.fileno() if self._listener is not None else -1,
            "head": None if self._env.is_main else head,
        }
        try:
            self._monitor = MonitorProcess(options)
        except OSError as error:  # no room for another process
            log.warning("watch: %s has no monitor (%s)", names[place], error)


class MonitorProcess:
    """The monitor of this node, started again if it was killed, as for lack of memory.

    `options`: those of monitor.py.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._leaving = False
        self.process = spawn(options)
        self._keeper = threading.Thread(target=self._keep, name="monitor", daemon=True)
        self._keeper.start()

    def leave(self, wait_s: float) -> None:
        """It ends with its ranks; it may wait for storage, and ends by itself."""
        self._leaving = True
        assert self.process.stdin is not None
        self.process.stdin.close()
        wake(self.process.pid)
        self._keeper.join(wait_s)

    def _keep(self) -> None:
        began, node = time.monotonic(), self._options["node"]
        while (code := self.process.wait()) and not self._leaving:
            how = "ended " + (f"(exit code {code})" if code > 0 else f"({signal.Signals(-code).name})")
            if time.monotonic() - began < STARTED_S:
                log.warning("watch: the monitor of %s %s again; its ranks are not watched", node, how)
                return
            log.warning("watch: the monitor of %s %s and is started again", node, how)
            began = time.monotonic()
            try:
                self.process = spawn(self._options)
            except OSError as error:
                log.warning("watch: %s has no monitor (%s)", node, error)
                return


def spawn(options: Mapping[str, Any]) -> subprocess.Popen[str]:
    """Without site-packages (-S), which the monitor does not need: it starts in half the time. Its options go
    through its standard input: other users of the host can read a command line, with the token in it.
    """
    try:
        errors = sys.stderr.fileno()  # under Ray a file that the driver follows, and not descriptor 2
    except (AttributeError, OSError, ValueError):
        errors = None
    with delayed(SIGNALS):  # one that comes before the monitor ignores them would end it
        monitor = subprocess.Popen(
            [sys.executable, "-S", "-m", "fsdp.watch.monitor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            pass_fds=(options["listener"],) if options["listener"] >= 0 else (),
            cwd="/",
            text=True,
        )
    assert monitor.stdin is not None
    monitor.stdin.write(json.dumps(options) + "\n")
    monitor.stdin.flush()
    return monitor


def _pid_namespace() -> str:
    """The number of the PID namespace in which the process ids in file names hold."""
    return proc.pid_namespace().removeprefix("pid:[").removesuffix("]")


def remove_stale_names() -> None:
    """Remove files of dead processes: ranks that were killed together with their monitor leave theirs."""
    names = f"shardrun-{_pid_namespace()}-*"
    for file in (file for folder in status_page.folders() for file in folder.glob(names)):
        number = file.name.split("-")[2]
        if number.isdigit() and not proc.exists(int(number)):
            with contextlib.suppress(OSError):  # another user's, or gone already
                file.unlink()


def _listener(others: Sequence[str]) -> socket.socket | None:
    """At this host's address on the route to another node, by that node's address towards the rendezvous;
    None, with a warning, if there is no route: each node then judges for itself.
    """
    outside_first = sorted(filter(None, others), key=is_loopback)
    reason: object = "no route to another node"
    for address in filter(None, map(address_towards, outside_first)):
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, 0), family=family, backlog=1024)
        except OSError as error:
            reason = error
    log.warning("watch: the nodes' monitors do not meet, and each judges for itself (%s)", reason)
    return None


def _node_names(places: list[str], hosts: Mapping[str, str]) -> dict[str, str]:
    """Host names, with a number for a further PID namespace of the same host."""
    names: dict[str, str] = {}
    for place in places:
        alike = [other for other in names if hosts[other] == hosts[place]]
        names[place] = hosts[place] + (f"-{len(alike) + 1}" if alike else "")
    return names
