"""A rank's side of the watch: its status page, its responder, and the monitor of its node.

    with Watch(config.watch, env, run.path) as watch:
        phases.listen(watch.phase)

Entering costs one collective and, on each node's first rank, the start of the monitor process. Leaving by an
exception hands the rank's failure report to the monitor, which prints the first failure of all ranks;
told(error) then waits for that, and returns whether it was printed.
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
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from fsdp.base import proc
from fsdp.base.phases import ACTIVITIES
from fsdp.base.stop_signals import SIGNALS, delayed
from fsdp.config import WatchSection
from fsdp.dist import collectives
from fsdp.dist.addresses import listen
from fsdp.dist.env import DistEnv, rendezvous_host
from fsdp.dist.stop import LAST_ACTS
from fsdp.rundir.lock_holder import this_place
from fsdp.watch import status_page
from fsdp.watch.collective_calls import CollectiveCounter
from fsdp.watch.cuda_timing import device_clock
from fsdp.watch.failure_report import failure_report
from fsdp.watch.last_process import wait_until_printed, wake
from fsdp.watch.monitor_options import MonitorOptions
from fsdp.watch.responder import Responder
from fsdp.watch.status_page import FAILED, LEFT, OVER, PID, STATE, THREAD, StatusPage, Writer

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
MONITOR_END_S = 2.0


class Watch:
    """Entering is collective. With --watch.enabled false it does nothing.

    `process_ends`: after a failure too, unlike a notebook. The monitor then ends a process that has failed
    and does not end.
    """

    def __init__(self, section: WatchSection, env: DistEnv, run: Path, *, process_ends: bool = False) -> None:
        self._section, self._env, self._run = section, env, run
        self._process_ends = process_ends
        self._page: StatusPage | None = None
        self._monitor: subprocess.Popen[bytes] | None = None

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
        own = self._page
        self._writer = Writer(own.numbers)
        self._calls = CollectiveCounter(self._writer)
        self._device = device_clock(self._writer) if own.numbers[status_page.CUDA] else None
        LAST_ACTS.append(self._mark_over)
        ACTIVITIES.listener = self._writer.activity
        return self

    def _observable(self) -> StatusPage:
        """This rank's page and responder. OSError where a monitor could not observe it."""
        if not proc.shows_this_process():
            raise OSError("/proc is of another PID namespace")
        remove_stale_names()
        own = status_page.create(f"shardrun-{_pid_namespace()}-{os.getpid()}-{secrets.token_hex(4)}.page")
        own.numbers[PID], own.numbers[THREAD] = os.getpid(), threading.get_native_id()
        own.numbers[status_page.CUDA] = self._env.device.type == "cuda"
        try:
            self._responder = Responder(own.path, self._env.device)
        except OSError:
            own.path.unlink()
            raise
        return own

    def phase(self, name: str, step: int) -> None:
        """A listener of fsdp/base/phases.py."""
        if self._page is not None:
            self._writer.phase(name, step)
            if self._device is not None:
                self._device.phase(name, step)

    def left_out(self, parameters: str) -> None:
        """A listener of branch_check.py."""
        if self._page is not None:
            self._page.write_left_out(parameters)

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
        if self._monitor is not None:
            self._end_monitor(self._monitor, error is None)
        if not hasattr(error, "status_page"):
            self._page.path.unlink(missing_ok=True)  # in case no monitor has started, which removes the name
            self._page.close()
        self._page = None

    # ------------------------------------------------------------ the end

    def _mark_over(self) -> None:
        """At a second Ctrl-C the process ends at once, which is no fault."""
        if self._page is not None:
            self._page.numbers[STATE] = OVER

    def _report(self, error: BaseException) -> None:
        assert self._page is not None
        failure = failure_report(error, self._env)
        self._page.write_failure(failure)
        write_torchrun_error_file(failure)
        self._page.numbers[STATE] = FAILED if self._process_ends else LEFT
        # Ray's driver prints its ranks' failures itself
        if self._env.launcher != "ray" and self._process_ends:
            error.status_page = self._page  # type: ignore[attr-defined]

    def _end_monitor(self, monitor: subprocess.Popen[bytes], succeeded: bool) -> None:
        """It ends with its ranks. After a failure this rank does not wait for it."""
        assert monitor.stdin is not None
        monitor.stdin.close()
        wake(monitor.pid)
        if succeeded:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for storage, and ends by itself
                monitor.wait(MONITOR_END_S)

    # ------------------------------------------------------------ the start of the monitor

    def _start_monitor(self) -> None:
        """Collective: also of ranks without a page, which no monitor observes."""
        spread = self._env.local_world_size < self._env.world_size
        listener = listen(0, backlog=128) if spread and self._env.is_main else None
        place = this_place() or socket.gethostname()
        path = "" if self._page is None else str(self._page.path)
        everyone = collectives.all_gather_objects((place, socket.gethostname(), path, _meeting(listener)))
        by_place: dict[str, list[int]] = {}
        for rank, (its_place, _, _, _) in enumerate(everyone):
            by_place.setdefault(its_place, []).append(rank)
        pages = {rank: everyone[rank][2] for rank in by_place[place] if everyone[rank][2]}
        if self._env.rank == next(iter(pages), None):
            names = _node_names(list(by_place), {its_place: host for its_place, host, _, _ in everyone})
            meeting = everyone[0][3] if len(by_place) > 1 else None
            options = MonitorOptions(
                node=names[place],
                run=str(self._run),
                ranks=pages,
                nodes={names[its_place]: ranks for its_place, ranks in by_place.items()},
                hang_s=self._section.hang_s,
                late_percent=self._section.late_percent,
                launcher=self._env.launcher,
                token=meeting[0] if meeting else "",
                listener=listener.fileno() if listener is not None and meeting is not None else -1,
                addresses=tuple(meeting[1]) if meeting and not self._env.is_main else (),
                prints_failures=self._env.launcher != "ray",
            )
            try:
                self._monitor = _spawn(options)
            except OSError as error:  # no room for another process
                log.warning("watch: %s has no monitor (%s)", options.node, error)
        if listener is not None:
            listener.close()


def _pid_namespace() -> str:
    """The number of the PID namespace in which the process ids in file names hold."""
    return proc.pid_namespace().removeprefix("pid:[").removesuffix("]")


def remove_stale_names() -> None:
    """Remove files of dead processes: ranks that were killed together with their monitor leave theirs."""
    names = f"shardrun-{_pid_namespace()}-*"
    for one in (file for folder in status_page.folders() for file in folder.glob(names)):
        number = one.name.split("-")[2]
        if number.isdigit() and not proc.exists(int(number)):
            with contextlib.suppress(OSError):  # another user's, or gone already
                one.unlink()


def _meeting(listener: socket.socket | None) -> tuple[str, list[tuple[str, int]]] | None:
    """A token of this run's monitors, and the addresses of the head."""
    if listener is None:
        return None
    hosts = dict.fromkeys([rendezvous_host(), socket.gethostname()])
    return secrets.token_hex(8), [(host, listener.getsockname()[1]) for host in hosts if host]


def _node_names(places: list[str], hosts: dict[str, str]) -> dict[str, str]:
    """Host names, with a number for a further PID namespace of the same host."""
    names: dict[str, str] = {}
    for place in places:
        name, number = hosts[place], 2
        while name in names.values():
            name, number = f"{hosts[place]}-{number}", number + 1
        names[place] = name
    return names


def _spawn(options: MonitorOptions) -> subprocess.Popen[bytes]:
    """Without site-packages (-S), which the monitor does not need: it starts in half the time."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with delayed(SIGNALS):  # one that comes before the monitor ignores them would end it
        return subprocess.Popen(
            [sys.executable, "-S", "-m", "fsdp.watch.monitor", json.dumps(asdict(options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=_error_output(),
            env=environ,
            pass_fds=(options.listener,) if options.listener >= 0 else (),
            cwd="/",
        )


def _error_output() -> int | None:
    """This process's standard error. Under Ray a file that the driver follows, and not descriptor 2."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return None


def write_torchrun_error_file(failure: dict[str, Any]) -> None:
    """torchrun's summary then shows the first failure's line in place of `error_file: <N/A>`."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        line = "another rank ended first" if failure["secondary"] else failure["message"]
        # Whole seconds, and of equal ones torchrun takes the lower rank's: a consequence is a second later.
        extra = {"py_callstack": line, "timestamp": str(int(failure["time"]) + failure["secondary"])}
        text = json.dumps({"message": {"message": line, "extraInfo": extra}})
        with contextlib.suppress(OSError):  # the failure itself is on the status page
            Path(file).write_text(text, encoding="utf-8")


def failure_was_printed(error: BaseException) -> bool:
    """Wait until the monitor has printed the first failure of all ranks; False if it does not.

    Call it last before the process ends. Signals are ignored from here on: a launcher that ends the other
    ranks does not interrupt the wait.
    """
    page: StatusPage | None = getattr(error, "status_page", None)
    if page is None:
        return False
    with contextlib.suppress(ValueError):  # not on the main thread, which alone has handlers
        for one in SIGNALS:
            signal.signal(one, signal.SIG_IGN)
    printed = wait_until_printed(page)
    page.path.unlink(missing_ok=True)
    page.close()
    return printed
