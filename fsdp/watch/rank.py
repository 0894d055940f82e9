"""A rank's side of the watch: its status page, its responder, and the monitor of its node.

    with Watch(config.watch, env, run.path) as watch:
        phases.listen(watch.phase)

Entering costs one collective, on several nodes two, and on each node's first rank the start of the monitor
process, which a thread starts again if it was killed. Leaving by an exception hands the rank's failure report
to the monitor, which prints the first failure of all ranks; failure_was_printed(error) in status_page.py then
waits for that.

The responder is a thread that answers the monitor's requests over a Unix socket:

    stacks       the stacks of all threads and each group's unfinished collective, as one JSON line
    exit CODE    end this process at once

It cannot answer while other code holds Python's lock, or while the process is stopped. Without the lock a
signal (STACK_SIGNAL) still makes faulthandler write the stacks, in C, into a file that the monitor has open.
"""

from __future__ import annotations

import contextlib
import dis
import faulthandler
import functools
import itertools
import json
import logging
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.compiler import is_compiling

from fsdp.base import proc
from fsdp.base.devices import set_thread_device
from fsdp.base.errors import LaunchError
from fsdp.base.phases import ACTIVITIES, SIGNALS, delayed
from fsdp.base.torch_private import flight_recorder_entries, functional_collectives
from fsdp.config import WatchSection
from fsdp.distributed import collectives
from fsdp.distributed.env import DistEnv, address_towards, is_loopback, rendezvous_host
from fsdp.distributed.stop import LAST_ACTS
from fsdp.rundir.lock import this_place
from fsdp.watch import status_page
from fsdp.watch.status_page import StatusPage, Writer, failure_report, wake, write_torchrun_error_file

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
MONITOR_END_S = 2.0
STARTED_S = 5.0
"""One that was started again and ends sooner stays away."""


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
        self._patches = contextlib.ExitStack()
        self.phase: Callable[[str, int], None] = lambda name, step: None
        """A listener of fsdp/base/phases.py."""

    def __enter__(self) -> Watch:
        if not self._section.enabled:
            return self
        page = self._page = self._observable()
        self._start_monitor(page)
        writer = status_page.Writer(page.numbers)
        self.phase = writer.phase
        self._patches.enter_context(counted_collectives(writer))
        if self._env.device.type == "cuda":
            clock = status_page.DeviceClock(writer)
            self.phase = clock.phase
            self._patches.enter_context(clock.timed_waits())
        LAST_ACTS.append(self._mark_over)
        ACTIVITIES.listener = writer.activity
        return self

    def _observable(self) -> StatusPage:
        """This rank's page and responder. LaunchError where a monitor could not observe it."""
        try:
            if not proc.shows_this_process():
                raise OSError("/proc is of another status_page.PID namespace")
            page = status_page.create()
        except OSError as error:
            message = f"rank {self._env.rank} cannot be watched ({error})."
            raise LaunchError(message, "--watch.enabled false", scope="rank") from None
        page.numbers[status_page.PID] = os.getpid()
        page.numbers[status_page.THREAD] = threading.get_native_id()
        page.numbers[status_page.CUDA] = self._env.device.type == "cuda"
        self._responder = Responder(self._env.device)
        return page

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._page is None:
            return
        LAST_ACTS.remove(self._mark_over)
        ACTIVITIES.listener = None
        self._patches.close()
        # a model's file may call sys.exit("pip install …"), and asyncio's CancelledError is no Exception
        if error is not None and not isinstance(error, KeyboardInterrupt):
            self._report(error, self._page)
        else:
            self.phase("end", int(self._page.numbers[status_page.STEP]))
            self._page.numbers[status_page.STATE] = (
                status_page.FAILED if error is not None and self._process_ends else status_page.OVER
            )
        self._responder.close()
        if self._monitor is not None:
            self._monitor.leave(wait_s=MONITOR_END_S if error is None else 0.0)
        if not hasattr(error, "status_page"):
            self._page.close()
        self._page = None

    def _mark_over(self) -> None:
        """At a second Ctrl-C the process ends at once, which is no fault."""
        if self._page is not None:
            self._page.numbers[status_page.STATE] = status_page.OVER

    def _report(self, error: BaseException, page: StatusPage) -> None:
        failure = failure_report(error, self._env)
        page.write_failure(failure)
        line = "another rank ended first" if failure["secondary"] else failure["message"]
        write_torchrun_error_file(line, secondary=failure["secondary"])
        page.numbers[status_page.STATE] = status_page.FAILED if self._process_ends else status_page.LEFT
        # Ray's driver prints its ranks' failures itself
        if self._env.launcher != "ray" and self._process_ends:
            error.status_page = page  # type: ignore[attr-defined]

    def _start_monitor(self, page: StatusPage) -> None:
        """Collective. The first rank of a node starts its monitor."""
        host, towards = socket.gethostname(), address_towards(rendezvous_host())
        files = os.getpid(), page.descriptor, self._responder.stacks.fileno(), self._responder.address
        place = this_place() or host
        everyone = collectives.all_gather_objects((place, host, towards, files))
        names: dict[str, str] = {}
        for its_place, its_host, *_ in everyone:
            # a host's further PID namespaces have a number behind its name
            name = f"{its_host}-{len(names) + 1}" if its_host in names.values() else its_host
            names.setdefault(its_place, name)
        nodes: dict[str, list[int]] = {name: [] for name in names.values()}
        for rank, (its_place, *_) in enumerate(everyone):
            nodes[names[its_place]].append(rank)
        listener, head, token = None, None, ""
        if len(nodes) > 1:
            if self._env.is_main:
                listener = _listener([its_towards for other, _, its_towards, _ in everyone if other != place])
                if listener is not None:
                    self._patches.enter_context(listener)
                    head, token = listener.getsockname()[:2], secrets.token_hex(16)
            head, token = collectives.broadcast_object((head, token))
        here = nodes[names[place]]
        if self._env.rank != here[0]:
            return
        options: dict[str, Any] = {
            "node": names[place],
            "run": str(self._run),
            "ranks": {},
            "nodes": nodes,
            "hang_s": self._section.hang_s,
            "late_percent": self._section.late_percent,
            "launcher": self._env.launcher,
            "token": token,
            "listener": listener.fileno() if listener is not None else -1,
            "head": None if self._env.is_main else head,
        }
        try:
            for rank in here:
                pid, page_file, stacks, address = everyone[rank][-1]
                options["ranks"][rank] = (_opened(pid, page_file), _opened(pid, stacks), address)
            self._monitor = MonitorProcess(options)
        except OSError as error:  # a rank has ended; or no room for another process
            log.warning("watch: %s has no monitor (%s)", options["node"], error)


def _opened(pid: int, descriptor: int) -> int:
    """A file of another rank, which then outlives it, for each monitor that is started."""
    return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


class MonitorProcess:
    """The monitor of this node, started again if it was killed, as for lack of memory.

    `options`: those of monitor.py.
    """

    def __init__(self, options: dict[str, Any]) -> None:
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
        for page, stacks, _ in self._options["ranks"].values():
            os.close(page)
            os.close(stacks)

    def _keep(self) -> None:
        began, node = -STARTED_S, self._options["node"]
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


def spawn(options: dict[str, Any]) -> subprocess.Popen[str]:
    """Without site-packages (-S), which the monitor does not need: it starts in half the time. Its options go
    through its standard input: other users of the host can read a command line, with the token in it.
    """
    try:
        errors = sys.stderr.fileno()  # under Ray a file that the driver follows, and not descriptor 2
    except (AttributeError, OSError, ValueError):
        errors = None
    watched = [files for page, stacks, _ in options["ranks"].values() for files in (page, stacks)]
    with delayed(SIGNALS):  # one that comes before the monitor ignores them would end it
        monitor = subprocess.Popen(
            [sys.executable, "-S", "-m", "fsdp.watch.monitor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            pass_fds=[*watched, *([options["listener"]] if options["listener"] >= 0 else [])],
            cwd="/",
            text=True,
        )
    assert monitor.stdin is not None
    monitor.stdin.write(json.dumps(options) + "\n")
    monitor.stdin.flush()
    return monitor


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


# ---------------------------------------------------------------- the responder

DEEPEST = 60


class Responder:
    """`address`: of its socket, in the abstract namespace. `stacks`: where faulthandler writes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._training = threading.get_ident()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("")  # the kernel chooses an address
        self._listener.listen(8)
        self.address: str = self._listener.getsockname().decode()
        self.stacks = os.fdopen(os.memfd_create("shardrun-stacks"), "w+", encoding="utf-8")
        self._was_enabled = faulthandler.is_enabled()
        # a fault in C (an abort of gloo, a bad pointer) writes its stacks there as well
        faulthandler.enable(file=self.stacks, all_threads=True)
        faulthandler.register(status_page.STACK_SIGNAL, file=self.stacks, all_threads=True, chain=False)
        threading.Thread(target=self._serve, name="responder", daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # which wakes its thread
        self._listener.close()
        # status_page.STACK_SIGNAL stays registered, with its file: one that comes late would end the process
        faulthandler.disable()
        if self._was_enabled:
            # a program may have put something without a descriptor in the place of its standard error
            with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
                faulthandler.enable()

    def _serve(self) -> None:
        set_thread_device(self._device)  # NCCL's recorder asks events whether they have passed
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            # the monitor may have stopped waiting
            with connection, contextlib.suppress(OSError):
                peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                _, user, _ = struct.unpack("3i", peer)
                if user != os.geteuid():  # an address without a file has no permissions
                    continue
                command, _, code = connection.recv(64).decode().partition(" ")
                if command == "exit":
                    os._exit(int(code))
                connection.sendall(json.dumps(self.snapshot()).encode() + b"\n")

    def snapshot(self) -> dict[str, Any]:
        """Fields of an Observation: stacks of all threads but this one, the flight recorder's collectives."""
        from fsdp.watch.observe import group_calls
        from fsdp.watch.replica_checks import BranchCheck

        # "Dummy-N" is what Python notes of a thread of C code, as one of autograd's, that asked for its name
        names = {t.ident: t.name for t in threading.enumerate() if not t.name.startswith("Dummy-")}
        frames = sys._current_frames()
        training = frames.pop(self._training, None)
        # at once: the thread runs on while another call here waits
        stack, moving = _stack(training), training is not None and _runs_python(training)
        frames.pop(threading.get_ident())
        # with its number: an evaluation's readers have the names of a step's
        threads = {f"{names.get(ident, 'unnamed')} {ident}": _stack(frame) for ident, frame in frames.items()}
        try:
            calls = [vars(call) for call in group_calls(flight_recorder_entries())]
        except Exception:  # of a torch whose recorder has another form: an answer still has the stacks
            calls = []
        skipped = BranchCheck.current.skipped() if BranchCheck.current is not None else []
        return {"stack": stack, "moving": moving, "threads": threads, "calls": calls, "skipped": skipped}


def _runs_python(frame: FrameType) -> bool:
    """Whether this thread was interrupted at the end of a loop's round or the beginning of a function: only
    there does the interpreter hand over its lock by itself. A thread that waits in C code is at a call.
    """
    instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return "JUMP_BACKWARD" in instruction or instruction == "RESUME"


def _stack(frame: FrameType | None) -> list[list[Any]]:
    """Innermost first: file, line, function. An instruction that belongs to no line, as of an except block's
    end, has None for its line: it is 0 here.
    """
    frames = [frame for frame, _ in itertools.islice(traceback.walk_stack(frame), DEEPEST)]
    return [[frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name] for frame in frames]


# ---------------------------------------------------------------- collectives


@contextlib.contextmanager
def counted_collectives(writer: Writer) -> Iterator[None]:
    """Counts the training thread's collectives, and the time inside.

    torch.distributed's functions are wrapped: FSDP2, our own reductions and users' code call them as
    attributes of the module, so one place sees them; DDP's buckets are reduced in C++ and are not seen. On
    CPU the time inside is the time that a rank waits for others; on CUDA it is that of the call. Collectives
    of another thread pass through uncounted: a save's have an order of their own, and on CUDA those of a
    backward run in autograd's thread. There the flight recorder knows them.

    Exchanges of the axes context, tensor and expert may be functional collectives, which return at once: one
    of those is counted where it is waited for.
    """
    functional = functional_collectives()
    outermost, counter = [True], [0]  # a call that is made of others counts once
    last = [0.0]  # the functional collective that is waited for next
    count = functools.partial(_counted, writer, outermost, counter)
    wrapped: list[tuple[Any, str, Callable[..., Any]]] = []
    for number, name in enumerate(status_page.OPS):
        if call := getattr(dist, name, None):
            wrapped.append((dist, name, count([float(number)], call)))
        if call := getattr(functional, name, None):
            wrapped.append((functional, name, _noted(last, float(number), call)))
    wrapped.append((functional, "wait_tensor", count(last, functional.wait_tensor)))
    with contextlib.ExitStack() as patches:
        # who has imported a wrapped function by its name calls the original from then on
        patches.callback(outermost.__setitem__, 0, False)
        for module, name, call in wrapped:
            patches.enter_context(mock.patch.object(module, name, call))
        yield


def _noted(last: list[float], number: float, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            last[0] = number
        return original(*args, **kwargs)

    return call


def _counted(
    writer: Writer,
    outermost: list[bool],
    counter: list[int],
    number: list[float],
    original: Callable[..., Any],
) -> Callable[..., Any]:
    # All names are local to the closure: this runs in every collective of every step.
    ident, training_thread, now, numbers = (
        threading.get_ident,
        threading.get_ident(),
        status_page.clock,
        writer.numbers,
    )
    begun_at, ended_at, op_at, numel_at = (
        status_page.BEGUN,
        status_page.ENDED,
        status_page.OP,
        status_page.NUMEL,
    )

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not outermost[0] or ident() != training_thread:
            return original(*args, **kwargs)
        outermost[0] = False
        counter[0] = count = counter[0] + 1
        numbers[op_at] = number[0]
        # of the first argument or the first tensor given by name; 0 for objects, whose size may differ
        values = args[:1] or kwargs.values()
        numbers[numel_at] = next((value.numel() for value in values if hasattr(value, "numel")), 0)
        writer.follow(number[0])
        numbers[begun_at] = count
        began = now()
        try:
            return original(*args, **kwargs)
        finally:
            writer.waited += now() - began
            numbers[ended_at] = count
            outermost[0] = True

    return call
