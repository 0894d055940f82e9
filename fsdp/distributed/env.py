"""The rank, the sizes and the device of this process: the only reader of rank variables. Also what a person
types under the launcher of a run, for hints; this host's addresses; errors of collectives that another rank's
end has caused.

`from_environment()` reads torchrun's variables, Slurm's own (`srun python train.py`, one task per rank) or
none, and returns a `DistEnv`; Ray's adapter builds a `DistEnv` itself. MPI's variables are read to refuse
processes that would each train alone. All other modules are independent of the launcher. Not here: the
process group (fsdp/distributed/process_group.py) and the mesh (fsdp/distributed/mesh.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import logging
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fsdp.base.errors import ConfigError, LaunchError
from fsdp.base.phases import follow_parent
from fsdp.base.text import as_typed

if TYPE_CHECKING:
    import torch


log = logging.getLogger(__name__)

DeviceChoice = Literal["auto", "cpu", "cuda"]
"""--run.device: auto is a GPU if torch sees one."""


@dataclass(frozen=True)
class DistEnv:
    """One process's place among the ranks. The launcher's adapter sets the device; it is computed once."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    device: torch.device
    launcher: str

    @functools.cached_property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def job(self) -> str:
        """The scheduler's name for this start, or empty. A requeued job keeps its number."""
        return job_start()

    def __str__(self) -> str:
        return (
            f"rank {self.rank}({self.world_size}) local {self.local_rank}({self.local_world_size}) "
            f"node {self.node_rank}({self.num_nodes}) {self.device} via {self.launcher}"
        )


# ---------------------------------------------------------------- before a DistEnv exists


def prints_shared_errors(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this is the one process that prints an error that all ranks meet."""
    # the first of them decides: torchrun numbers nodes by address, so its rank 0 may be in any task of srun
    rank = _first_of(environ, "RANK", *_MPI_RANKS, "SLURM_PROCID")
    return rank == "0" or not rank.isdecimal()


def prints_on_node(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this is the one process of its node that prints an error that all ranks there meet."""
    return _first_of(environ, "LOCAL_RANK", *_MPI_LOCAL_RANKS, "SLURM_LOCALID") == "0"


def _first_of(environ: Mapping[str, str], *names: str) -> str:
    """The value of the first variable that is set, or 0."""
    return next((environ[name] for name in names if name in environ), "0")


_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Of mpirun: Open MPI's, and that of MPICH and Intel MPI, which `srun --mpi=pmi2` sets too."""
_MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
_MPI_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


RANK_0_PRINTS_S = 5.0
"""torchrun and mpirun end all ranks once one has ended: the others wait this long for rank 0 to print."""


def wait_for_rank_0() -> None:
    """Wait on a rank that does not print an error itself, and whose end would end rank 0 too early."""
    if started_by() in ("torchrun", "mpirun"):
        time.sleep(RANK_0_PRINTS_S)


def started_by(environ: Mapping[str, str] = os.environ) -> str:
    """`torchrun`, `srun` or `mpirun` if it started this process as one of several ranks; else empty."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return "torchrun"
    # Typed in a shell that `srun --pty` has started: the shells of srun's other tasks have no terminal and
    # have ended. Such a shell gives each command a process group of its own, srun does not.
    is_typed = "SLURM_PTY_PORT" in environ and os.isatty(0) and os.getpgrp() != os.getsid(0)
    is_task = "SLURM_PROCID" in environ and not is_typed
    tasks = _integer(environ, "SLURM_STEP_NUM_TASKS", 1) if is_task else 1
    # mpirun starts its daemons by srun, one task a node: their ranks inherit the daemon's variables
    ranks = _first_of(environ, *_MPI_SIZES)
    if ranks.isdecimal() and int(ranks) not in (0, 1, tasks):
        return "mpirun"
    # a task beyond their number has not received the other variables, as in a container: it is refused
    return "srun" if tasks > 1 or (is_task and _integer(environ, "SLURM_PROCID") >= tasks) else ""


# ---------------------------------------------------------------- the DistEnv


def from_environment(environ: Mapping[str, str] = os.environ, device: DeviceChoice = "auto") -> DistEnv:
    """torchrun's variables first (torchrun may run inside a Slurm step), then Slurm's, then one process."""
    if device != "cpu":
        check_gpus_are_seen(environ)
    launcher = started_by(environ)
    if launcher == "torchrun":
        if "TORCHELASTIC_RUN_ID" in environ:
            follow_parent()
        return _from_torchrun(environ, device)
    if launcher == "srun":
        return _from_slurm(environ, device)
    if launcher == "mpirun":  # each of its processes would train alone
        ranks = _first_of(environ, *_MPI_SIZES)
        raise LaunchError(
            f"mpirun started {ranks} processes, whose ranks are not read from MPI's variables.",
            f"torchrun --nproc_per_node={ranks} train.py; or export RANK, WORLD_SIZE, LOCAL_RANK, "
            "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each process",
        )
    return DistEnv(0, 1, 0, 1, 0, 1, pick_device(0, device), "a single process")


HINT = "start with torchrun, srun, or neither and no RANK set"
IN_A_CONTAINER = "docker run --env-file <(env | grep ^SLURM_) gives a container all of Slurm's variables"


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        hint = IN_A_CONTAINER if name.startswith("SLURM_") else HINT
        raise LaunchError(f"{name} is {text!r} and not a number.", hint) from None


def _rank_of(
    environ: Mapping[str, str], rank: str, size: str, default: tuple[int | None, int | None] = (None, None)
) -> tuple[int, int]:
    """The rank and the size in these variables, which must agree."""
    numbers = _integer(environ, rank, default[0]), _integer(environ, size, default[1])
    if not 0 <= numbers[0] < numbers[1]:
        raise LaunchError(
            f"{rank} is {numbers[0]}, and {size} is {numbers[1]}: ranks count from 0 to one below it.",
            f"export {rank} and {size}, or start with torchrun or srun, which set them",
            scope="rank",
        )
    return numbers


def _from_torchrun(environ: Mapping[str, str], device: DeviceChoice) -> DistEnv:
    """The variables of torchrun, or of any launcher that sets RANK and WORLD_SIZE."""
    rank, world = _rank_of(environ, "RANK", "WORLD_SIZE")
    local = _rank_of(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE", (0, 1))
    node = _integer(environ, "GROUP_RANK", rank // local[1])
    nodes = _integer(environ, "GROUP_WORLD_SIZE", max(1, world // local[1]))
    launcher = "torchrun under Slurm" if "SLURM_JOB_ID" in environ else "torchrun"
    return DistEnv(rank, world, *local, node, nodes, pick_device(local[0], device), launcher)


def _from_slurm(environ: Mapping[str, str], device: DeviceChoice) -> DistEnv:
    ranks = _rank_of(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", (0, 1))
    local_rank = _integer(environ, "SLURM_LOCALID")
    nodes = _integer(environ, "SLURM_NODEID"), _integer(environ, "SLURM_STEP_NUM_NODES", 1)
    device_of_rank = pick_device(local_rank, device, "srun")
    return DistEnv(*ranks, local_rank, _tasks_on_node(environ), *nodes, device_of_rank, "srun")


def _tasks_on_node(environ: Mapping[str, str]) -> int:
    """This node's entry in SLURM_STEP_TASKS_PER_NODE, such as `2(x3),1`."""
    name, nodes = "SLURM_STEP_TASKS_PER_NODE", _integer(environ, "SLURM_STEP_NUM_NODES", 1)
    node, text = _integer(environ, "SLURM_NODEID", 0), environ.get(name, "")
    if nodes == 1 and not text:
        return _integer(environ, "SLURM_STEP_NUM_TASKS")
    counts: list[int] = []
    try:
        for part in text.split(","):
            tasks, _, times = part.partition("(x")
            counts += [int(tasks)] * int(times.rstrip(")") or 1)
        return counts[node]
    except (ValueError, IndexError):
        problem = f"{name} is {text!r}, without a number of tasks for node {node} of {nodes}."
        raise LaunchError(problem, IN_A_CONTAINER) from None


# ---------------------------------------------------------------- what a person types under a launcher

FEWER_RANKS = {
    "srun": "--ntasks-per-node={}",
    "submitit": "--gpus-per-node {}",
    "launch.local": "--ranks {}",
    "ray": "--ray.num_workers {}",
}
"""Each launcher's flag for the number of ranks on a node; torchrun's for all others."""
WITHOUT_NODES = {
    "sbatch": "sbatch --exclude={hosts}",
    "srun": "srun --exclude={hosts}",
    "submitit": "python -m launch.submit --exclude={hosts}",
    "ray": "`ray stop` on {hosts} removes it from the cluster",
    "torchrun": "torchrun --nnodes={left} on the others",
}
SLURM = {"sbatch": "sbatch --mem", "srun": "srun --mem", "submitit": "python -m launch.submit --mem"}
"""The flag for a job's memory under Slurm."""


def fewer_ranks(launcher: str, count: int) -> str:
    return FEWER_RANKS.get(launcher.split(" ")[0], "--nproc_per_node={}").format(count)


@dataclass(frozen=True)
class LauncherHints:
    """`launcher`: a key of WITHOUT_NODES, or a launcher of one machine alone."""

    launcher: str = "torchrun"
    nodes: int = 1

    def without(self, hosts: Sequence[str]) -> str:
        """Leaves out these hosts; empty under a launcher of one machine alone."""
        left = max(1, self.nodes - len(hosts))
        return as_typed(WITHOUT_NODES.get(self.launcher, "").format(hosts=",".join(hosts), left=left))

    @property
    def more_memory(self) -> str:
        """Where the limit of a process's memory is set."""
        flag = as_typed(SLURM.get(self.launcher, ""))
        return f"{flag}, the container's" if flag else "the container's, such as docker run --memory"


def launcher_hints(launcher: str, nodes: int, environ: Mapping[str, str] = os.environ) -> LauncherHints:
    """`launcher` as in DistEnv."""
    name = launcher.split(" ")[0]
    scripts = not environ.keys().isdisjoint(("SHARDRUN_LAUNCHER", "SHARDRUN_RAY_NODES"))
    if launcher == "torchrun under Slurm" or (scripts and launcher != "submitit (slurm)"):
        name = "sbatch"
    return LauncherHints("one machine" if launcher == "submitit (local)" else name, nodes)


# ---------------------------------------------------------------- the device


def pick_device(local_rank: int, wanted: DeviceChoice = "auto", launcher: str = "torchrun") -> torch.device:
    """The device of a local rank; number 0 if the scheduler shows each process one device.

    --run.device cpu hides the GPUs from this process: FSDP2 and pinned memory detect an accelerator by
    themselves.
    """
    if wanted == "cpu":
        set_variable("CUDA_VISIBLE_DEVICES", "")
    import torch

    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if wanted == "cuda":
            lasting = not (torch.version.cuda or torch.version.hip)
            raise (ConfigError if lasting else LaunchError)(
                f"--run.device cuda, but torch {torch.__version__} sees no GPU on {socket.gethostname()}"
                f"{_hidden(os.environ)}.",
                "--run.device cpu, or a CUDA build of torch and a driver: nvidia-smi shows the driver's GPUs",
                scope="node",
            )
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible > 1 and local_rank >= visible:
        raise LaunchError(
            f"local rank {local_rank} has no device: {visible} are visible on {socket.gethostname()}.",
            fewer_ranks(launcher, visible),
            scope="rank",  # the ranks below it have a device and print nothing
        )
    return torch.device("cuda", local_rank if visible > 1 else 0)


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def allocator_variable(settings: str, *, cuda: bool) -> dict[str, str]:
    """The variable with the allocator's settings; empty on a CPU, and where the user has set one."""
    if not (cuda and settings) or any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        return {}
    return {ALLOCATOR_VARIABLES[0]: settings}


def set_allocator(settings: str, device: torch.device) -> None:
    """Set the allocator's settings before CUDA starts, when torch reads them."""
    for name, value in allocator_variable(settings, cuda=device.type == "cuda").items():
        set_variable(name, value)


def check_gpus_are_seen(environ: Mapping[str, str] = os.environ) -> None:
    """LaunchError if Slurm allocated GPUs that torch does not see.

    A torch without CUDA, or a container without the driver, would otherwise train on the CPU beside them.
    """
    import torch

    given = environ.get("SLURM_GPUS_ON_NODE", "0")
    if given not in ("", "0") and not torch.cuda.is_available():
        raise LaunchError(
            f"Slurm gave {given} GPUs on {socket.gethostname()}, but torch {torch.__version__} sees none"
            f"{_hidden(environ)}.",
            "a CUDA build of torch in VENV, `apptainer exec --nv`, or --run.device cpu to train on the CPU",
            scope="node",  # other nodes may see theirs
        )


def _hidden(environ: Mapping[str, str]) -> str:
    """A variable that hides GPUs from CUDA, where it is set: a name of none, or of other GPUs."""
    name = "CUDA_VISIBLE_DEVICES"
    return f", with {name}={environ[name]!r}" if name in environ else ""


# ---------------------------------------------------------------- the job


def unused_allocation(env: DistEnv, environ: Mapping[str, str] = os.environ) -> str:
    """A warning if this is the only process of a Slurm job of several tasks or nodes, or one of
    several torchruns that do not form one run; else empty.
    """
    job, under_pty = environ.get("SLURM_JOB_ID"), "SLURM_PTY_PORT" in environ
    if job is None:
        return ""
    if env.launcher == "torchrun under Slurm":
        tasks, nodes = _integer(environ, "SLURM_STEP_NUM_TASKS", 1), environ.get("SLURM_STEP_NUM_NODES", "1")
        if tasks <= env.num_nodes or under_pty:  # of `srun --pty` the first task alone is left
            return ""
        alone = f"{tasks} torchruns in a step of Slurm job {job}, and this one has --nnodes={env.num_nodes}"
        return f"{alone}: they train apart. HINT: sbatch --nodes={nodes} slurm/fsdp.sbatch"
    count = _integer(environ, "SLURM_JOB_NUM_NODES", 1)
    tasks = _integer(environ, "SLURM_NTASKS", count)
    if env.launcher != "a single process" or max(count, tasks) == 1:
        return ""
    # the step of a shell that `srun --pty` has started holds the job's processors
    srun = f"srun {'--overlap ' if under_pty else ''}python train.py"
    alone = f"one process alone in Slurm job {job} of {count} nodes and {tasks} tasks"
    return f"{alone}. HINT: {srun}, or sbatch --nodes={count} slurm/fsdp.sbatch"


def job_start(environ: Mapping[str, str] = os.environ) -> str:
    """`Slurm job 12, start 3`, with `, try 2` if slurm/lib.sh restarted the ranks in the same allocation."""
    if "SLURM_JOB_ID" not in environ:
        return ""
    start = f"Slurm job {environ['SLURM_JOB_ID']}, start {_integer(environ, 'SLURM_RESTART_COUNT', 0) + 1}"
    tried = environ.get("SHARDRUN_TRY", "0")
    return start if tried == "0" else f"{start}, try {int(tried) + 1}"


PAST_END_S = 600.0
"""A job is ended within minutes of its end: a shell that outlived its job has an end longer ago."""


AFTER_RANKS_S, AFTER_RANKS_BEGINS = 20.0, 3
"""What the ranks leave a job that follows its deadline alone: the end of their processes, the judgement and
the requeue. At least so many seconds, and so many times as long as slurm/lib.sh took to begin.
"""


def end_time(environ: Mapping[str, str] = os.environ) -> float | None:
    """When the ranks must have saved, in seconds since 1970: before the job's time limit. slurm/lib.sh sets
    that where an older Slurm does not.
    """
    text = environ.get("SLURM_JOB_END_TIME", "")
    if not text.isdigit() or int(text) <= time.time() - PAST_END_S:
        return None
    begin_s = _integer(environ, "SHARDRUN_BEGIN_S", 0)
    return float(text) - max(AFTER_RANKS_S, AFTER_RANKS_BEGINS * begin_s)


# ---------------------------------------------------------------- the rendezvous


def slurm_rendezvous(environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Address and port of rank 0 for `srun python train.py`, which cannot probe ports.

    Equal on all ranks, new at each requeue and step. slurm/fsdp.sbatch probes ports and exports MASTER_ADDR
    and MASTER_PORT instead.
    """
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "localhost")
    job, step = _integer(environ, "SLURM_JOB_ID"), _integer(environ, "SLURM_STEP_ID", 0)
    restart = _integer(environ, "SLURM_RESTART_COUNT", 0)
    # below 32768, where the kernel's range of ephemeral ports begins
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)  # up to a comma outside of brackets
    host = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else nodes)
    return host, 20000 + (job * 31 + step * 7 + restart) % 12000


def rendezvous_host(environ: Mapping[str, str] = os.environ) -> str:
    """The host of the rendezvous in the launcher's variables; empty for a single process."""
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"]
    return slurm_rendezvous(environ)[0] if "SLURM_STEP_ID" in environ else ""


def rendezvous_port() -> int:
    default = None if "MASTER_ADDR" in os.environ else slurm_rendezvous()[1]
    return _integer(os.environ, "MASTER_PORT", default)


def agent_serves_store() -> bool:
    """Whether torchrun's agent serves the rendezvous store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def set_variable(name: str, value: str) -> None:
    """Change one environment variable, and log the change."""
    old = os.environ.get(name)
    if old != value:
        os.environ[name] = value
        log.info("environment %s: %s → %s", name, old, value)


# ---------------------------------------------------------------- this host's addresses


def resolves(name: str) -> str:
    """The address of a name; empty if it does not resolve."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def address_towards(host: str) -> str:
    """This host's own address on the route to another; empty if there is no route. Nothing is sent."""
    with contextlib.suppress(OSError):  # the name does not resolve
        for family, kind, protocol, _, where in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
    return ""


def interface_of(address: str) -> str:
    """The name of the network interface with this address; empty if there is none."""
    bare = address.partition("%")[0]  # a link's own address has its interface behind it
    return next((name for name, own in _interfaces() if own == bare), "")


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def listen(port: int, backlog: int) -> socket.socket:
    """A socket that accepts connections on all of this host's addresses; port 0 is any free one."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # turned off in this network namespace; or the port is taken
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=backlog)


class _Entry(ctypes.Structure):
    """The first fields of `struct ifaddrs`."""

    _fields_ = (
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
    )


def _interfaces() -> Iterator[tuple[str, str]]:
    """Each interface's name with each of its addresses, the secondary ones too, as gloo looks them up."""
    libc, first = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "the network interfaces cannot be listed")
    try:
        place = first.value
        while place:
            entry = _Entry.from_address(place)
            name, where = entry.name.decode(), entry.address
            family = ctypes.c_ushort.from_address(where).value if where else socket.AF_UNSPEC
            if family == socket.AF_INET:
                yield name, socket.inet_ntop(family, ctypes.string_at(where + 4, 4))
            elif family == socket.AF_INET6:
                yield name, socket.inet_ntop(family, ctypes.string_at(where + 8, 16))
            place = entry.next
    finally:
        libc.freeifaddrs(first)


# ---------------------------------------------------------------- a peer that is gone

PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "NCCL communicator was aborted",
)
"""Texts of gloo, NCCL and c10d, which raise a plain RuntimeError or torch.distributed.DistError."""
TRANSPORT = ("gloo/transport", "Watchdog caught collective operation timeout")
"""gloo names the source file of its transport in all its errors, time-outs too."""


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank has ended: that rank's error is the first one."""
    return _has_text(error, PEER_GONE)


def is_peer_failure(error: BaseException) -> bool:
    """Whether a collective failed because of another rank, which has ended or did not come in time; or
    whether such a failure is the cause of this error.
    """
    return any(
        _has_text(one, (*PEER_GONE, *TRANSPORT)) for one in (error, error.__cause__) if one is not None
    )


def _has_text(error: BaseException, texts: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
