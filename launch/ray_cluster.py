"""The driver's Ray and its terminal: a local Ray for one run, or a cluster that is joined and left as it was;
the workers' resources; stop signals, which become the ranks' stop file; the ranks' output.

The local Ray starts during the driver's imports, ends with the driver, and its folder is removed. Ray is
imported in the functions that use it, after its variables are set.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from fsdp import config as configuration
from fsdp.base.errors import LaunchError, ShardrunError, first_line
from fsdp.base.phases import SIGNALS, stop_signals
from fsdp.base.text import counted, print_line
from fsdp.config import Config, RaySection, worker_range
from fsdp.config.trust import named_code
from fsdp.rundir import history
from fsdp.rundir.history import RunDir, write_atomically
from launch.guard import EXIT_INTERRUPTED, Failure

REPOSITORY = Path(__file__).resolve().parent.parent
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the new behaviour, so that Ray does not warn of the old one
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # each rank writes its own files: Follower
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",  # it would log each report
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths in flags stay relative to the driver's folder
    # the interval in which a dead worker is detected and one report is read
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
    "RAY_worker_niceness": "0",  # as torchrun's ranks; at Ray's 15 other work of the machine starves training
    # a job of `ray job submit` may have a runtime_env with the same fields: that of code_of comes first
    "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",
}
"""Defaults; a variable that is set already is kept."""
OWN = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a local Ray has no preemption
    # Without a token Ray leaves one in ~/.ray/auth_token, and each later `ray start --head` demands it.
    "RAY_AUTH_MODE": "token",
}
"""Defaults of a local Ray."""
STORE_BYTES = 128 << 20
"""Nothing here uses Ray's object store: far below its default of a third of the memory."""
PR_SET_PDEATHSIG = 1
CONNECT_S, INIT_S = 5.0, 180.0
NODES = "SHARDRUN_RAY_NODES"
"""Set by a job script that starts the cluster: the number of nodes to wait for."""
NODES_S, POLL_S = 120.0, 0.1
SECOND_SIGINT_S = 1.0
SNAPSHOT = "checkpoint_manager_snapshot.json"
"""Ray's list of checkpoints in its storage."""


def set_defaults(variables: Mapping[str, str] = QUIET) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def with_address(config: Config) -> Config:
    """The address as ray.init finds it: --ray.address, else RAY_ADDRESS. Empty for a Ray of one's own."""
    variable = os.environ.get("RAY_ADDRESS", "")
    # http://… is the address of `ray job submit`
    variable = "" if variable.startswith("http") else variable
    address = config.ray.address or variable
    if address == "auto":
        address = variable if variable not in ("", "auto", "local") else newest_address()
    return configuration.replace(config, ray__address="" if address == "local" else address)


def newest_address() -> str:
    """The cluster that `auto` means: that of the last `ray start` here. "auto" if Ray has to look for one."""
    folder = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray"
    with contextlib.suppress(OSError):
        return (folder / "ray_current_cluster").read_text().strip() or "auto"
    return "auto"


# ---------------------------------------------------------------- a local Ray


class OwnRay:
    """`ray start` in a session of its own: a signal to the driver's process group (a terminal's Ctrl-C,
    `timeout`) reaches the driver alone. It starts while the driver imports torch: both take seconds.
    """

    failed = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        prctl = ctypes.CDLL(None).prctl

        def before_exec() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

        with (self.folder / "start.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", "from ray.scripts.scripts import main; main()"),
                    *("start", "--head", "--block", "--port=0", "--node-ip-address=127.0.0.1"),
                    *(f"--temp-dir={self.folder}", "--include-dashboard=false", "--log-color=false"),
                    f"--object-store-memory={STORE_BYTES}",
                ],
                # no idle Python processes, one per core, which no worker here uses
                env={**os.environ, "RAY_prestart_worker_first_driver": "0"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=before_exec,
            )

    def wait(self) -> str:
        """The address of this Ray, once it has started."""
        address = self.folder / "ray_current_cluster"
        while not address.exists() or not (text := address.read_text()):
            if self._process.poll() is not None:
                printed = (self.folder / "start.log").read_text(errors="replace").splitlines()
                self.failed = True
                raise LaunchError(
                    f"Ray did not start here: {(printed or ['it printed nothing'])[-1].strip().rstrip('.')}.",
                    "the same command again; or more open files (`ulimit -n`), memory or processor time; "
                    f"its logs are in {self.folder}",
                )
            time.sleep(POLL_S)
        return text

    def end(self) -> None:
        # SIGTERM would drain the node first; Ray's agents outlive their parents
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def own_ray(section: RaySection) -> Iterator[OwnRay | None]:
    """Start a Ray here unless --ray.address names one; stop it at the end of the block."""
    if importlib.util.find_spec("ray") is None:
        raise LaunchError("--backend ray needs Ray, which is not installed.", "pip install 'ray[train]'")
    set_defaults()
    if section.address:
        yield None
        return
    set_defaults(OWN)
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        set_defaults({"RAY_AUTH_TOKEN": secrets.token_hex(16)})
    # a short path, for Ray's sockets
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp" if os.access("/tmp", os.W_OK) else "/dev/shm"))
    local = OwnRay(folder)
    try:
        yield local
    finally:
        local.end()
        if not local.failed:
            shutil.rmtree(folder, ignore_errors=True)  # Ray's last processes may still write


# ---------------------------------------------------------------- connecting


@contextmanager
def connected(local: OwnRay | None, config: Config) -> Iterator[str]:
    """Connect to the local Ray or the one at --ray.address for this block. Yields its version and address."""
    address = local.wait() if local is not None else config.ray.address
    import ray

    for name in ("ray", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if address.startswith("ray://") and importlib.util.find_spec("grpc") is None:
        raise LaunchError(
            f"--ray.address {address} needs Ray Client, which is not installed.",
            "pip install 'ray[client]', or the command on a node of the cluster with --ray.address auto",
        )
    _wait_for_port(address, time.monotonic() + (NODES_S if NODES in os.environ else 0))
    try:
        with _deadline(address):
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={} if local is not None else {"py_modules": code_of(config)},
            )
    except (ImportError, ray.exceptions.AuthenticationError, OSError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"--ray.address {address}: no Ray there accepts this driver ({first_line(error)}).",
            "a Ray that found ~/.ray/auth_token when it started demands that token: "
            "export RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN if the token is not in this machine's file; "
            "or ray start --head there first",
        ) from None
    try:
        taken = address if address.startswith("ray://") else ray.get_runtime_context().gcs_address
        yield f"Ray {ray.__version__}{', started here' if local is not None else f' at {taken}'}"
    finally:
        ray.shutdown()


@contextmanager
def _deadline(address: str) -> Iterator[None]:
    """End the process if the block takes longer than INIT_S: a cluster whose port answers and that is not
    healthy keeps Ray's core waiting.
    """

    def end() -> None:
        hint = "ray status there; or leave --ray.address out to start one here"
        print_line(f"train.py: --ray.address {address}: no answer within {INIT_S:.0f} s. HINT: {hint}")
        os._exit(LaunchError.exit_code)

    timer = threading.Timer(INIT_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _wait_for_port(address: str, until: float) -> None:
    """Fail early if nothing listens there: Ray itself retries for more than a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    while host and port.isdigit():
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        except OSError as error:
            if time.monotonic() > until:
                raise LaunchError(
                    f"--ray.address {address}: no Ray answers there ({first_line(error)}).",
                    "ray start --head on that machine first, or leave --ray.address out to start one here",
                ) from None
            time.sleep(POLL_S)


def code_of(config: Config) -> list[str]:
    """This code and the user's modules, as folders and files that Ray copies to every node of a joined
    cluster. A local Ray shares this process's sys.path; packages installed with pip must be on the nodes.
    """
    names = {name.partition(":")[0].partition(".")[0] for name in named_code(config)} - {"fsdp", "launch"}
    specs = filter(None, map(importlib.util.find_spec, sorted(names)))
    sources = [(spec.submodule_search_locations or [spec.origin or ""])[0] for spec in specs]
    sources = [source for source in sources if "site-packages" not in source and Path(source).exists()]
    return [str(REPOSITORY / "fsdp"), str(REPOSITORY / "launch"), *sources]


# ---------------------------------------------------------------- the resources


@dataclass(frozen=True)
class Workers:
    """The number of workers, and the resources of each."""

    low: int
    high: int
    cpus: float
    gpus: float

    @property
    def threads(self) -> int:
        """1, as torchrun sets it, unless OMP_NUM_THREADS is set (of a list for nested regions the first is
        taken) or a worker has several CPUs.
        """
        first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        return (int(first) if first.isdecimal() else 0) or max(1, int(self.cpus))

    def __str__(self) -> str:
        count = f"{self.low}" if self.low == self.high else f"{self.low} to {self.high}"
        return f"{count} workers × {_amounts(self.cpus, self.gpus)}"


def _amounts(cpus: float, gpus: float) -> str:
    return f"{cpus:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")


def workers_for(section: RaySection, device: str) -> Workers:
    """The workers of the flags; LaunchError if the connected Ray has no room for them."""
    nodes = _nodes()
    low, high = worker_range(section.num_workers)
    requested = section.gpus_per_worker
    if requested == "auto":
        requested = "1" if any(node.get("GPU", 0) >= 1 for node in nodes) else "0"
    gpus = 0.0 if device == "cpu" else float(requested)
    if device == "cuda" and not gpus:
        raise LaunchError(
            "--run.device cuda, but the workers request no GPU of this Ray.", "--ray.gpus_per_worker 1"
        )
    workers = Workers(low, high, section.cpus_per_worker, gpus)
    needs = {name: need for name, need in (("CPU", workers.cpus), ("GPU", gpus)) if need}
    # resources in use by others count as free: they may be released
    room = sum(min(int(node.get(name, 0) / need + 1e-9) for name, need in needs.items()) for node in nodes)
    if room < low:
        has = ", ".join(_amounts(node.get("CPU", 0), node.get("GPU", 0)) for node in nodes)
        less = "--ray.cpus_per_worker 0.5, --ray.gpus_per_worker 0, or more nodes"
        raise LaunchError(
            f"{workers} do not fit on {counted(len(nodes), 'node')} of {has}: room for {room}.",
            f"--ray.num_workers {room}, or more nodes" if room else less,
        )
    return workers


def _nodes() -> list[dict[str, float]]:
    """The resources of each node. Waits for those of a cluster that a job script starts."""
    import ray

    expected, deadline = int(os.environ.get(NODES, "1")), time.monotonic() + NODES_S
    while len(nodes := [node["Resources"] for node in ray.nodes() if node["Alive"]]) < expected:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{len(nodes)} of {expected} Ray nodes are up after {NODES_S:.0f} s.",
                "read the output of `ray start` on the other nodes",
            )
        time.sleep(POLL_S)
    return nodes


# ---------------------------------------------------------------- the driver's terminal


class RankFailed(Exception):
    """The failure of one rank, as a worker raises it. All values are in args, so that it pickles."""

    def __init__(self, rank: int, failure: Failure) -> None:
        super().__init__(rank, failure)
        self.rank, self.failure = rank, failure

    def __str__(self) -> str:
        named, message = f"rank {self.rank}", self.failure.message
        return message if message.startswith(named) else f"{named}: {message}"


class StoppedEarly(ShardrunError):
    """A signal came before the ranks started."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        name = signal.Signals(number).name
        super().__init__(f"{name} before the ranks started: nothing was trained in this start.")


class Stopping:
    """Stop signals of the driver. When a process connects, Ray's core replaces the handler of SIGTERM by one
    that prints a trace and aborts. So the signals are blocked, in every thread, from the driver's start until
    `handle` is called after that; a thread waits for them meanwhile, and ends a driver whose ranks have not
    started. A second Ctrl-C, a second or more after the first, ends the process at once.
    """

    run: RunDir | None = None
    """Whose STOPPED has the reason: a Slurm job is requeued after it."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._received_at = 0.0
        self._training = self._connected = False
        signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
        self._thread = threading.Thread(target=self._await, name="signals", daemon=True)
        self._thread.start()

    def _await(self) -> None:
        """End the process, which may import or wait in Ray's core for minutes."""
        while not self._connected:
            if (received := signal.sigtimedwait(stop_signals(), POLL_S)) is not None:
                error = self._early(received.si_signo)
                os.write(2, f"train.py: {error}\n".encode())
                os._exit(error.exit_code)

    def handle(self) -> None:
        """Call it when Ray has connected."""
        self._connected = True
        self._thread.join()
        for number in stop_signals():
            signal.signal(number, self._record)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())

    def _record(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._received_at = signal.Signals(number), now
            if not self._training:
                raise self._early(number)
        elif number == signal.SIGINT and now - self._received_at >= SECOND_SIGINT_S:
            os.write(2, b"train.py: interrupted again: the driver ends now, nothing is saved\n")
            os._exit(EXIT_INTERRUPTED)

    def _early(self, number: int) -> StoppedEarly:
        if self.run is not None:
            self.mark(self.run, signal.Signals(number).name, history.last_step(self.run.metrics))
        return StoppedEarly(number)

    @staticmethod
    def mark(run: RunDir, reason: str, step: int) -> None:
        write_atomically(run.stopped, f"{reason} at step {step}\n")

    def train(self, fit: Callable[[], Any], file: Path) -> Any:
        """The value of `fit`, called on a thread: on the main thread Ray would handle Ctrl-C."""
        result: Future[Any] = Future()

        def call() -> None:
            try:
                result.set_result(fit())
            except BaseException as error:
                result.set_exception(error)

        self._training = True
        threading.Thread(target=call, name="fit", daemon=True).start()
        while not wait([result], POLL_S).done:
            # each start removes the previous one's stop file: create it again until the ranks have ended
            if self.signal is not None and not file.exists():
                file.touch()
        if self.signal is not None:
            file.unlink(missing_ok=True)
        return result.result()


class Follower:
    """Copies new whole lines of the folder's files, which ranks write, to stdout and stderr, until `close`.

    Ray's own forwarding (every worker's lines, prefixed, sometimes twice) is switched off.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._read = folder, dict[Path, int]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Print all that has been written by now, and stop."""
        self._over.set()
        self._thread.join()
        self._print_new(to_the_end=True)

    def _follow(self) -> None:
        while not self._over.wait(POLL_S):
            self._print_new()

    def _print_new(self, to_the_end: bool = False) -> None:
        # .err before .out: the log of a start precedes its first step
        for ending, stream in ((".err", sys.stderr), (".out", sys.stdout)):
            for path in sorted(self._folder.glob(f"*{ending}")):
                with path.open("rb") as file:
                    file.seek(self._read.get(path, 0))
                    data = file.read()
                data = data if to_the_end else data[: data.rfind(b"\n") + 1]
                self._read[path] = self._read.get(path, 0) + len(data)
                print(data.decode("utf-8", errors="replace"), end="", file=stream, flush=True)
