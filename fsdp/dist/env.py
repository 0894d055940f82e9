"""Who and where this process is: the only reader of rank variables.

A launcher's job ends when `DistEnv` is known. `from_environment()` reads torchrun's variables, Slurm's own
(`srun python train.py`, one task a rank) or none at all; Ray's adapter builds a `DistEnv` itself. From there
on nobody asks who launched whom. Not here: the mesh (fsdp/dist/mesh.py) and anything about a model.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from fsdp.base.errors import LaunchError

# torch is imported in the functions that need it: what a person got wrong is said without waiting for it.
if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

log = logging.getLogger(__name__)

OLDEST_TORCH = (2, 11)
ABORT_S = 5.0
"""NCCL aborts within a second; a driver that hangs never does."""

DeviceChoice = Literal["auto", "cpu", "cuda"]
"""--run.device: auto is a GPU where torch sees one."""

FEWER_RANKS = {"srun": "--ntasks-per-node={}", "submitit": "--gpus-per-node {}", "launch.local": "--ranks {}"}
"""How each launcher starts a number of ranks on a node; torchrun's flag for all others."""


@dataclass(frozen=True, kw_only=True)
class DistEnv:
    """One process's place among the ranks. The launcher's adapter gives the device; nobody computes it again."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    device: torch.device
    launcher: str

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def job(self) -> str:
        """The scheduler's name for this start; empty where there is none. A job that is requeued keeps its
        number.
        """
        return slurm_start()

    def __str__(self) -> str:
        return (
            f"rank {self.rank}({self.world_size}) local {self.local_rank}({self.local_world_size}) "
            f"node {self.node_rank}({self.num_nodes}) {self.device} via {self.launcher}"
        )


def check_torch(version: str = "") -> None:
    """Refuse a torch in which FSDP2 and DCP are not what this code was proven on."""
    import torch

    version = version or torch.__version__
    major, minor = (int(part) for part in version.split("+")[0].split(".")[:2])
    if (major, minor) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise LaunchError(f"torch {version} is older than {oldest}.", "pip install torch==2.13.0")


def speaks_for_all(environ: Mapping[str, str] = os.environ) -> bool:
    """Before any DistEnv exists: is this the one process that should print an error that all will meet?"""
    return all(environ.get(name, "0") == "0" for name in ("RANK", "SLURM_PROCID") if name in environ)


RANK_0_PRINTS_S = 5.0
"""torchrun ends all ranks once one has ended: the others leave rank 0 this time to print, and are ended by
then.
"""


def let_rank_0_print(environ: Mapping[str, str] = os.environ) -> None:
    """Called by a rank that leaves an error to rank 0 and would otherwise end before rank 0 has printed it."""
    if maker_of_ranks(environ) == "torchrun":
        time.sleep(RANK_0_PRINTS_S)


def maker_of_ranks(environ: Mapping[str, str] = os.environ) -> str:
    """`torchrun` or `srun` where this process is one of several ranks that it made; empty for a process of
    its own.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return "torchrun"
    return "srun" if _integer(environ, "SLURM_STEP_NUM_TASKS", 1) > 1 and "SLURM_PROCID" in environ else ""


def from_environment(environ: Mapping[str, str] = os.environ, device: DeviceChoice = "auto") -> DistEnv:
    """torchrun's variables first (torchrun may stand inside a Slurm step), then Slurm's, then a single
    process.
    """
    if device != "cpu":
        check_gpus_are_seen(environ)
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _from_torchrun(environ, device)
    if (
        "SLURM_PROCID" in environ
        and "SLURM_STEP_NUM_TASKS" in environ
        and int(environ["SLURM_STEP_NUM_TASKS"]) > 1
    ):
        return _from_slurm(environ, device)
    return DistEnv(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_rank=0,
        num_nodes=1,
        device=pick_device(0, device),
        launcher="a single process",
    )


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.lstrip("-").isdigit():
        raise LaunchError(
            f"{name} is {text!r} and not a number.", "start with torchrun, srun, or neither and no RANK set"
        )
    return int(text)


def _from_torchrun(environ: Mapping[str, str], device: DeviceChoice) -> DistEnv:
    world, local_world = _integer(environ, "WORLD_SIZE"), _integer(environ, "LOCAL_WORLD_SIZE", 1)
    local_rank = _integer(environ, "LOCAL_RANK", 0)
    return DistEnv(
        rank=_integer(environ, "RANK"),
        world_size=world,
        local_rank=local_rank,
        local_world_size=local_world,
        node_rank=_integer(environ, "GROUP_RANK", 0),
        num_nodes=_integer(environ, "GROUP_WORLD_SIZE", max(1, world // local_world)),
        device=pick_device(local_rank, device),
        launcher="torchrun under Slurm" if "SLURM_JOB_ID" in environ else "torchrun",
    )


def _from_slurm(environ: Mapping[str, str], device: DeviceChoice) -> DistEnv:
    local_rank = _integer(environ, "SLURM_LOCALID")
    return DistEnv(
        rank=_integer(environ, "SLURM_PROCID"),
        world_size=_integer(environ, "SLURM_STEP_NUM_TASKS"),
        local_rank=local_rank,
        local_world_size=_tasks_on_node(environ),
        node_rank=_integer(environ, "SLURM_NODEID"),
        num_nodes=_integer(environ, "SLURM_STEP_NUM_NODES", 1),
        device=pick_device(local_rank, device),
        launcher="srun",
    )


def _tasks_on_node(environ: Mapping[str, str]) -> int:
    """SLURM_STEP_TASKS_PER_NODE reads like `2(x3),1`: this node's entry."""
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", environ["SLURM_STEP_NUM_TASKS"]).split(","):
        tasks, _, times = part.partition("(x")
        counts += [int(tasks)] * int(times.rstrip(")") or 1)
    return counts[_integer(environ, "SLURM_NODEID", 0)]


def pick_device(local_rank: int, wanted: DeviceChoice = "auto") -> torch.device:
    """A scheduler that shows each process one device numbers it 0, whatever the local rank. --run.device cpu
    hides the GPUs from this process: FSDP2 and pinned memory look for an accelerator by themselves.
    """
    if wanted == "cpu":
        set_variable("CUDA_VISIBLE_DEVICES", "")
    import torch

    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if wanted == "cuda":
            error = LaunchError(
                f"--run.device cuda, but torch {torch.__version__} sees no GPU on {socket.gethostname()}.",
                "--run.device cpu, or a CUDA build of torch and a driver: nvidia-smi shows the driver's GPUs",
            )
            error.scope = "node"
            raise error
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible > 1 and local_rank >= visible:
        error = LaunchError(
            f"local rank {local_rank} has no device: {visible} are visible on {socket.gethostname()}.",
            f"--nproc_per_node={visible}",
        )
        error.scope = "rank"  # the ranks below it have one, and say nothing
        raise error
    return torch.device("cuda", local_rank if visible > 1 else 0)


def check_gpus_are_seen(environ: Mapping[str, str] = os.environ) -> None:
    """A torch without CUDA, or a container without its driver, would train on the CPU beside the GPUs that
    Slurm gave.
    """
    import torch

    given = environ.get("SLURM_GPUS_ON_NODE", "0")
    if given not in ("", "0") and not torch.cuda.is_available():
        error = LaunchError(
            f"Slurm gave {given} GPUs on {socket.gethostname()}, but torch {torch.__version__} sees none.",
            "a CUDA build of torch in VENV, `apptainer exec --nv`, or no --gpus-per-node to train on the CPU",
        )
        error.scope = "node"  # the others may see theirs
        raise error


def expand_hostlist(hosts: str) -> list[str]:
    """Slurm's `gpu[01-03,7],login` as names, for where scontrol is not at hand."""
    names: list[str] = []
    depth, start = 0, 0
    for at, char in enumerate(hosts + ","):
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            names += _expand_one(hosts[start:at])
            start = at + 1
    return names


def _expand_one(pattern: str) -> list[str]:
    head, bracket, rest = pattern.partition("[")
    if not bracket:
        return [pattern] if pattern else []
    inside, _, tail = rest.partition("]")
    middles: list[str] = []
    for part in inside.split(","):
        low, dash, high = part.partition("-")
        middles += [str(n).zfill(len(low)) for n in range(int(low), int(high if dash else low) + 1)]
    return [head + middle + end for middle in middles for end in (_expand_one(tail) or [""])]


def slurm_rendezvous(environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Address and port of rank 0 for `srun python train.py`, new at each requeue and step, equal on every
    rank.

    slurm/fsdp.sbatch probes and exports MASTER_ADDR and MASTER_PORT; this is for a bare srun, and cannot
    probe.
    """
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "localhost")
    job, step = _integer(environ, "SLURM_JOB_ID"), _integer(environ, "SLURM_STEP_ID", 0)
    restart = _integer(environ, "SLURM_RESTART_COUNT", 0)
    # below 32768, where the kernel begins to give ports to outgoing connections
    return expand_hostlist(nodes)[0], 20000 + (job * 31 + step * 7 + restart) % 12000


def slurm_start(environ: Mapping[str, str] = os.environ) -> str:
    """`Slurm job 12, start 3`, and `, try 2` where slurm/lib.sh started the ranks again in the same
    allocation.
    """
    if "SLURM_JOB_ID" not in environ:
        return ""
    start = f"Slurm job {environ['SLURM_JOB_ID']}, start {_integer(environ, 'SLURM_RESTART_COUNT', 0) + 1}"
    tried = environ.get("SHARDRUN_TRY", "0")
    return start if tried == "0" else f"{start}, try {int(tried) + 1}"


def end_time(environ: Mapping[str, str] = os.environ) -> float | None:
    """When the scheduler ends this job, in seconds since 1970: newer Slurms say it, slurm/lib.sh asks older
    ones.
    """
    text = environ.get("SLURM_JOB_END_TIME", "")
    return float(text) if text.isdigit() and int(text) > 0 else None


@contextmanager
def process_group(env: DistEnv, timeout_s: float, store: dist.Store | None = None) -> Iterator[None]:
    """The default group; one that somebody else made (Ray) is used as it is and left alone. Without a `store`
    its ranks meet as the launcher's variables say.
    """
    import torch
    import torch.distributed as dist

    if env.device.type == "cuda":
        torch.cuda.set_device(env.device)  # before any return: a group of somebody else's does not set it
    if dist.is_initialized():
        _check_same_size(env)
        yield
        return
    arguments = _group_arguments(env, timedelta(seconds=timeout_s), store)
    if env.device.type == "cuda" and env.world_size > 1:
        check_devices_differ(
            env, dist.PrefixStore("devices", arguments["store"]), _device_id(env.device), timeout_s
        )
    dist.init_process_group(**arguments)
    try:
        yield
    except BaseException:
        _abort_groups(env)
        raise
    dist.destroy_process_group()


def _abort_groups(env: DistEnv) -> None:
    """After an exception no group is destroyed: NCCL's destroy waits for kernels whose other ranks never come
    (NCCL issue 863), gloo's for its threads. Abort ends NCCL's kernels; should it hang itself, this rank
    leaves without it.
    """
    aborting = threading.Thread(target=_abort, args=(env,), name="abort", daemon=True)
    aborting.start()
    aborting.join(ABORT_S)
    if aborting.is_alive():
        log.warning(
            "rank %d: its process groups are not aborted after %g s: it leaves without", env.rank, ABORT_S
        )


def _abort(env: DistEnv) -> None:
    import torch

    from fsdp.base.torch_private.distributed import abort_all_groups

    try:
        if env.device.type == "cuda":
            torch.cuda.set_device(env.device)  # a thread begins on device 0
        abort_all_groups()
    except Exception as error:  # the rank has failed already, with an error that says more than this one
        log.warning("rank %d: its process groups are not aborted: %s", env.rank, error)


def _check_same_size(env: DistEnv) -> None:
    import torch.distributed as dist

    if (dist.get_rank(), dist.get_world_size()) != (env.rank, env.world_size):
        raise LaunchError(
            f"the launcher says rank {env.rank} of {env.world_size}, "
            f"the process group {dist.get_rank()} of {dist.get_world_size()}."
        )


def _device_id(device: torch.device) -> str:
    """The same for two processes on one GPU, and only then. NCCL_HOSTID is how NCCL itself tells hosts apart."""
    import torch

    return f"{os.environ.get('NCCL_HOSTID') or socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


def check_devices_differ(env: DistEnv, store: dist.Store, device_id: str, timeout_s: float) -> None:
    """LaunchError on every rank where two ranks of a node have one GPU: NCCL refuses that later, in a raw
    error. Four requests to the store a rank.
    """
    store.set(f"rank {env.rank}", device_id)
    if store.add(device_id, 1) > 1:
        store.add("shared", 1)
    if store.add("counted", 1) == env.world_size:
        store.set("all are counted", "")
    store.wait(["all are counted"], timedelta(seconds=timeout_s))
    if not store.add("shared", 0):
        return
    holders: dict[str, list[int]] = {}
    for rank in range(env.world_size):
        holders.setdefault(store.get(f"rank {rank}").decode(), []).append(rank)
    shared, ranks = next((device, ranks) for device, ranks in holders.items() if len(ranks) > 1)
    host, _, gpu = shared.partition(" ")
    there = [of for device, of in holders.items() if device.startswith(f"{host} ")]
    raise LaunchError(
        f"ranks {', '.join(map(str, ranks))} on {host} have one GPU between them ({gpu}): "
        f"{sum(map(len, there))} ranks and {len(there)} GPU{'s' if len(there) > 1 else ''} are there.",
        FEWER_RANKS.get(env.launcher.split(" ")[0], "--nproc_per_node={}").format(len(there)),
    )


def _group_arguments(env: DistEnv, timeout: timedelta, store: dist.Store | None) -> dict[str, Any]:
    import torch.distributed as dist

    cuda = env.device.type == "cuda"
    arguments: dict[str, Any] = {
        # Not "cpu:gloo": torch then leaves the default backend unset once a plugin is known, and warns as the
        # group ends.
        "backend": "cpu:gloo,cuda:nccl" if cuda else "gloo",
        "rank": env.rank,
        "world_size": env.world_size,
        "timeout": timeout,
        "device_id": env.device if cuda else None,
    }
    if store is None and env.world_size == 1:
        store = dist.HashStore()  # no port, so nothing to collide with
    elif store is None:
        # As init_process_group does with an init_method: torchrun's restarts each have a prefix of their own
        # in it.
        store, _, _ = next(
            iter(dist.rendezvous(_init_method(env), env.rank, env.world_size, timeout=timeout))
        )
        store.set_timeout(timeout)
        store = dist.PrefixStore("default_pg", store)
    return arguments | {"store": store}


def _init_method(env: DistEnv) -> str:
    if "MASTER_ADDR" in os.environ:
        return "env://"
    if env.launcher != "srun":
        raise LaunchError(f"rank {env.rank} has no MASTER_ADDR.", "start with torchrun, or srun")
    address, port = slurm_rendezvous()
    return f"tcp://{address}:{port}"


def meeting_address(environ: Mapping[str, str] = os.environ) -> str:
    """Where the ranks of this start meet, as its launcher says; empty for a single process."""
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"]
    return slurm_rendezvous(environ)[0] if "SLURM_STEP_ID" in environ else ""


def interface_is_given(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether gloo is told its interface, and needs no name for its own host."""
    return bool(environ.get("GLOO_SOCKET_IFNAME"))


def meeting_store(env: DistEnv, timeout_s: float, *, serves: bool = True) -> dist.Store:
    """The store that the ranks meet in, without waiting for any: who has not come can then be named. Under
    torchrun its agent serves it, else rank 0 does where it `serves`.
    """
    import torch.distributed as dist

    if env.world_size == 1:
        return _alone()
    address = meeting_address()
    if not address:
        raise LaunchError(f"rank {env.rank} has no MASTER_ADDR.", "start with torchrun, or srun")
    port = _integer(os.environ, "MASTER_PORT", None if "MASTER_ADDR" in os.environ else slurm_rendezvous()[1])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return dist.TCPStore(
            address,
            port,
            is_master=serves and env.is_main and not agent,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        why = str(error).splitlines()[0][:120]
        lost = LaunchError(
            f"rank {env.rank} on {socket.gethostname()} does not reach {address}:{port} ({why}).",
            "does the name resolve there, and is the port open? RDZV_HOST in slurm/cluster.env names another",
        )
        lost.scope = "rank"
        raise lost from None


@functools.cache
def _alone() -> dist.Store:
    import torch.distributed as dist

    return dist.HashStore()


def set_variable(name: str, value: str) -> None:
    """Change one environment variable, and say so."""
    old = os.environ.get(name)
    if old != value:
        os.environ[name] = value
        log.info("environment %s: %s → %s", name, old, value)


__all__ = [
    "DistEnv", "check_gpus_are_seen", "check_torch", "end_time", "expand_hostlist", "from_environment", "interface_is_given",
    "let_rank_0_print", "meeting_address", "meeting_store", "pick_device", "process_group", "set_variable",
    "slurm_rendezvous", "speaks_for_all",
]  # fmt: skip
