"""The default process group: its rendezvous store, its time-out, and its abort after an exception. And the
checks between its ranks before training: equal versions, free devices, and one run directory.

These take a few milliseconds and one exchange of objects. Measurements that take seconds (devices, links,
storage) are in fsdp/doctor, which starts with these facts too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import platform
import resource
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp.base.devices import set_thread_device
from fsdp.base.errors import LaunchError, first_line
from fsdp.base.text import counted, listed, named_ranks
from fsdp.base.torch_private import abort_all_groups, all_groups
from fsdp.distributed import collectives
from fsdp.distributed.env import (
    DistEnv,
    address_towards,
    agent_serves_store,
    fewer_ranks,
    interface_of,
    is_loopback,
    rendezvous_host,
    rendezvous_port,
    resolves,
    set_variable,
)
from fsdp.distributed.mesh import CUDA_BACKENDS

log = logging.getLogger(__name__)

ABORT_S = 5.0
"""NCCL aborts within a second; a driver that hangs never does."""
_ended: list[dist.ProcessGroup] = []
"""Groups that have been destroyed or aborted, until the modules that used them are freed."""
MEETING_POLL_S = 0.02
OTHER_ADDRESS = "export another MASTER_ADDR and MASTER_PORT in each process (slurm/cluster.env: RDZV_HOST)"
WAITING_S = 10.0
"""A rank that has not reached the rendezvous by then logs why."""


@contextmanager
def process_group(env: DistEnv, timeout_s: float, store: dist.Store | None = None) -> Iterator[None]:
    """Create the default group, and destroy it at the end of the block; abort it after an exception.

    An existing default group (Ray's) is used and left as it is. Without a `store` the ranks meet at the
    address in the launcher's variables.
    """
    if env.device.type == "cuda":
        torch.cuda.set_device(env.device)  # before any return: an existing group has not set it
    raise_open_files_limit()
    if dist.is_initialized():
        _check_existing(env)
        yield
        return
    on_cuda, timeout = env.device.type == "cuda", timedelta(seconds=timeout_s)
    store = _default_store(env, timeout) if store is None else store
    if on_cuda and env.world_size > 1:
        check_devices_differ(env, dist.PrefixStore("devices", store), _device_id(env.device))
    if env.num_nodes > 1:
        set_gloo_interface(env, dist.PrefixStore("addresses", store))
    dist.init_process_group(
        # Not "cpu:gloo": torch then leaves the default backend unset if a plugin is registered, and warns
        # when the group is destroyed.
        backend=CUDA_BACKENDS if on_cuda else "gloo",
        rank=env.rank,
        world_size=env.world_size,
        timeout=timeout,
        device_id=env.device if on_cuda else None,
        store=store,
    )
    try:
        yield
    except BaseException:
        _ended.extend(all_groups())
        _abort_groups(env)
        raise
    _ended.extend(all_groups())
    dist.destroy_process_group()


def free_ended_groups() -> None:
    """Call it when the modules are freed: before, one of DDP may be the last that refers to its group, and
    hang (`all_groups`). A process that ends needs no call.
    """
    _ended.clear()


def raise_open_files_limit() -> None:
    """Raises the soft limit of open files to the hard one: gloo opens sockets to every rank, and many shells
    set 1024.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit of open files cannot be raised to %d: %s", hard, error)


def _abort_groups(env: DistEnv) -> None:
    """Abort all groups on a thread, and wait ABORT_S for it.

    After an exception no group is destroyed: NCCL's destroy waits for kernels whose other ranks never come
    (NCCL issue 863), gloo's for its threads. Abort ends NCCL's kernels, but may hang itself.
    """

    def abort() -> None:
        try:
            set_thread_device(env.device)
            abort_all_groups()
        except Exception as error:  # the first error has the cause: this one is only logged
            log.warning("rank %d: its process groups are not aborted: %s", env.rank, error)

    aborting = threading.Thread(target=abort, name="abort", daemon=True)
    aborting.start()
    aborting.join(ABORT_S)
    if aborting.is_alive():
        log.warning("rank %d: its process groups are not aborted after %g s: it exits now", env.rank, ABORT_S)


def _check_existing(env: DistEnv) -> None:
    """LaunchError for a default group of the caller that a run cannot use."""
    backends, rank, ranks = dist.get_backend_config(), dist.get_rank(), dist.get_world_size()
    if (rank, ranks) != (env.rank, env.world_size) or (env.device.type == "cuda" and "cpu:" not in backends):
        raise LaunchError(
            f"the process group that this process has made is of rank {rank} of {ranks} with the backends "
            f"{backends}, and the launcher's variables give rank {env.rank} of {env.world_size}.",
            f'init_process_group("{CUDA_BACKENDS if env.device.type == "cuda" else "gloo"}")',
        )


def _device_id(device: torch.device) -> str:
    """Equal for two processes on one GPU, and only then. NCCL itself compares hosts by NCCL_HOSTID."""
    host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    return f"{host} {torch.cuda.get_device_properties(device).uuid}"


def check_devices_differ(env: DistEnv, store: dist.Store, device_id: str) -> None:
    """LaunchError on all ranks of a node if two of them have one GPU, before NCCL fails with a raw error."""
    store.set(f"{env.node_rank} {env.local_rank}", device_id)
    devices = [store.get(f"{env.node_rank} {local}").decode() for local in range(env.local_world_size)]
    shared = next((device for device in devices if devices.count(device) > 1), "")
    if not shared:
        return
    first, (host, _, gpu), gpus = env.rank - env.local_rank, shared.partition(" "), len(set(devices))
    ranks = [first + local for local, device in enumerate(devices) if device == shared]
    raise LaunchError(
        f"ranks {', '.join(map(str, ranks))} on {host} share one GPU ({gpu}): "
        f"{host} has {len(devices)} ranks and {counted(gpus, 'GPU')}.",
        fewer_ranks(env.launcher, gpus),
        scope="node",
    )


def set_gloo_interface(env: DistEnv, store: dist.Store) -> None:
    """Name gloo's interface where this host's name has no address that other nodes reach.

    gloo would send the address of that name to the other ranks, which wait half an hour for it. The interface
    is that of the route to rank 0, or, where rank 0's address is this host itself, to another node.
    """
    address, host = address_towards(rendezvous_host()), socket.gethostname()
    if env.local_rank == 0:
        store.set(str(env.node_rank), address)
    own = resolves(host)
    if os.environ.get("GLOO_SOCKET_IFNAME") or (own and not is_loopback(own)):
        return
    if not address or is_loopback(address):
        address = address_towards(store.get("1" if env.node_rank == 0 else "0").decode())
        if not address or is_loopback(address):
            return  # several "nodes" on one machine
    interface = interface_of(address)
    if interface in ("", "lo"):
        name = f"resolves to {own}, which only {host} itself reaches" if own else "does not resolve"
        raise LaunchError(
            f"the name {host} {name}, and {env.num_nodes} nodes use it.",
            f"export GLOO_SOCKET_IFNAME=INTERFACE on {host}, or correct its /etc/hosts",
            scope="node",
        )
    set_variable("GLOO_SOCKET_IFNAME", interface)


def _default_store(env: DistEnv, timeout: timedelta) -> dist.Store:
    if env.world_size == 1:
        return dist.HashStore()  # no port, so no collision
    store = rendezvous_store(env, timeout.total_seconds(), waits=True)
    if not agent_serves_store():
        return dist.PrefixStore("default_pg", store)
    tries = dist.PrefixStore("tries", store)
    return dist.PrefixStore(f"default_pg {_meet_in_a_new_try(env, tries, timeout)}", store)


def _meet_in_a_new_try(env: DistEnv, store: dist.Store, timeout: timedelta) -> str:
    """A name for this try, the same on all ranks, and new.

    torchrun's agent serves one store for all its tries, in which a restarted rank could read the address of a
    dead one. No variable numbers the tries: the agents of several nodes count restarts differently, and do
    not count one for a node that joins. So each rank asks under a token of its own, and rank 0 answers until
    all have read its answer: a token of an earlier try may lie where a rank has not yet set its own.
    """
    if env.rank:
        token = secrets.token_hex(8)
        store.set(f"token of rank {env.rank}", token)
        name = store.get(f"answer to {token}").decode()
        store.set(f"rank {env.rank} in {name}", "")
        return name
    name, deadline = secrets.token_hex(8), time.monotonic() + timeout.total_seconds()
    others = range(1, env.world_size)
    tokens = [f"token of rank {rank}" for rank in others]
    store.wait(tokens)
    while not store.check([f"rank {rank} in {name}" for rank in others]):
        if time.monotonic() > deadline:
            absent = [rank for rank in others if not store.check([f"rank {rank} in {name}"])]
            raise LaunchError(
                f"{named_ranks(absent)} did not meet rank 0 within {timeout.total_seconds():g} s.",
                "the first error on their nodes; or a longer --run.process_group_timeout_s",
            )
        answers = [f"answer to {token.decode()}" for token in store.multi_get(tokens)]
        store.multi_set(answers, [name] * len(answers))  # type: ignore[attr-defined]  # not in torch's stubs
        time.sleep(MEETING_POLL_S)
    return name


def rendezvous_store(
    env: DistEnv, timeout_s: float, *, serves: bool = True, waits: bool = False
) -> dist.Store:
    """The rendezvous store. Under torchrun its agent serves it; otherwise rank 0 does, if it `serves`, and
    `waits` for the other ranks. Without waiting a rank that is missing can be named.
    """
    if env.world_size == 1:
        return _store_of_one()
    address = rendezvous_host()
    if not address:
        raise LaunchError(f"rank {env.rank} has no MASTER_ADDR.", "start with torchrun, or srun")
    port = rendezvous_port()
    with _explained(env, address, port):
        return dist.TCPStore(
            address,
            port,
            env.world_size if waits else None,
            is_master=serves and env.is_main and not agent_serves_store(),
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=waits,
            multi_tenant=True,
        )


@contextmanager
def _explained(env: DistEnv, address: str, port: int) -> Iterator[None]:
    """LaunchError for torch's of a store that this rank cannot reach, or cannot serve; a warning after
    WAITING_S, as torch tries again for minutes.
    """
    host = socket.gethostname()
    hint = f"check there that {address} resolves and that the port is open; {OTHER_ADDRESS}"

    def warn_of_waiting() -> None:
        """Silent where this rank waits for others there."""
        try:
            socket.create_connection((address, port), WAITING_S).close()
        except OSError as error:
            message = "%s cannot reach %s:%d, where rank 0 listens, for %g s (%s), and tries again. HINT: %s"
            log.warning(message, host, address, port, WAITING_S, (error.strerror or str(error)).lower(), hint)

    waiting = threading.Timer(WAITING_S, warn_of_waiting)
    waiting.daemon = True
    waiting.start()
    try:
        yield
    except (RuntimeError, ValueError) as error:
        problem = f"reach {address}:{port} ({first_line(error, 120).rstrip('.')})."
        if "EADDRINUSE" in str(error):
            problem, hint = f"listen at port {port}: it is in use.", OTHER_ADDRESS
        raise LaunchError(f"rank {env.rank} on {host} cannot {problem}", hint, scope="rank") from None
    finally:
        waiting.cancel()


@functools.cache
def _store_of_one() -> dist.Store:
    return dist.HashStore()


# ---------------------------------------------------------------- checks between the ranks before training

MUST_BE_EQUAL = ("torch", "cuda", "nccl")
TAKEN = 0.1
"""The share of a device's memory that other processes may hold without a warning."""
SAME_FILE_S = 5.0
"""How long a shared folder may take to show another node's file: NFS caches a folder for some seconds."""


@dataclass(frozen=True)
class RankFacts:
    """What one rank runs on, in strings and numbers, which can be sent and compared."""

    rank: int
    node: int
    host: str
    python: str
    torch: str
    cuda: str
    nccl: str
    driver: str
    device: str
    taken: float = 0.0
    """The share of its device's memory that is not free before the run allocates any."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def facts_of(env: DistEnv) -> RankFacts:
    on_cuda = env.device.type == "cuda"
    return RankFacts(
        rank=env.rank,
        node=env.node_rank,
        host=socket.gethostname(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=str(torch.version.cuda or ""),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if on_cuda else "",
        driver=_driver(),
        device=torch.cuda.get_device_name(env.device) if on_cuda else "cpu",
        taken=_taken(env.device) if on_cuda else 0.0,
    )


def _taken(device: torch.device) -> float:
    free, total = torch.cuda.mem_get_info(device)
    return 1 - free / total


def _driver() -> str:
    """The driver's version as the kernel module gives it: no program is started."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split("  ")[1].strip()
    except (OSError, IndexError):
        return ""


# ---------------------------------------------------------------- comparing


@dataclass(frozen=True)
class NodeDifference:
    """One fact that differs: its most common value, and the ranks with another one."""

    what: str
    usual: str
    others: Mapping[int, str]
    """Rank → its value."""
    fatal: bool

    def describe(self, everyone: Sequence[RankFacts]) -> str:
        hosts = {facts.rank: facts.host for facts in everyone}
        odd = [f"rank {rank} on {hosts[rank]} has {value or 'none'}" for rank, value in self.others.items()]
        return f"{self.what} is {self.usual or 'none'} on most ranks, but {listed(odd, 4)}"


def differences(everyone: Sequence[RankFacts]) -> list[NodeDifference]:
    """The facts that differ. The most common value is the expected one; at a tie, rank 0's."""
    names = [*MUST_BE_EQUAL, "python", "driver", "device"]
    found = []
    for name in names:
        values = {f.rank: str(getattr(f, name)) for f in everyone}
        usual = Counter(values.values()).most_common(1)[0][0]  # at a tie the first, which is rank 0's
        others = {rank: value for rank, value in values.items() if value != usual}
        if others:
            found.append(NodeDifference(name, usual, others, name in MUST_BE_EQUAL))
    return found


# ---------------------------------------------------------------- at each start


def check(env: DistEnv, run: Path | None, patience_s: float = SAME_FILE_S) -> None:
    """LaunchError on every rank if the ranks cannot train together; rank 0 logs other differences. `run` is
    the folder that the nodes share, if they share one.
    """
    if env.world_size == 1:
        return
    token = ""
    if run is not None and env.num_nodes > 1:
        token = collectives.on_main(env.rank, lambda: _create_probe(run))
    seen = not token or env.local_rank != 0 or run is None or appears(run / token, patience_s)
    found: list[tuple[RankFacts, bool]] = collectives.all_gather_objects((facts_of(env), seen))
    if token and run is not None and env.is_main:
        (run / token).unlink(missing_ok=True)
    everyone = [facts for facts, _ in found]
    for difference in differences(everyone):
        if difference.fatal:
            hint = "one environment that all nodes see: VENV in slurm/cluster.env, or a container"
            raise LaunchError(f"{difference.describe(everyone)}.", hint)
        if env.is_main:
            log.warning("%s", difference.describe(everyone))
    for facts in everyone if env.is_main else ():
        if facts.taken > TAKEN:
            message = "rank %d on %s: other processes hold %.0f%% of the memory of its %s. "
            message += "HINT: nvidia-smi lists them"
            log.warning(message, facts.rank, facts.host, 100 * facts.taken, facts.device)
    if env.is_main and (blind := sorted({facts.host for facts, sees in found if not sees})):
        # Only checkpoints need the folder on every node, and --checkpoint.dir may be elsewhere: no error.
        message = "%s does not see rank 0's run directory %s: is it on shared storage?"
        log.warning(message, ", ".join(blind), run)


def _create_probe(run: Path) -> str:
    name = f".seen-by-all-{secrets.token_hex(4)}"
    (run / name).write_text(socket.gethostname())
    return name


def appears(file: Path, patience_s: float = SAME_FILE_S) -> bool:
    """Whether a shared folder shows a file, which another node may have written just now."""
    deadline = time.monotonic() + patience_s
    # of os: the methods of Path raise for a folder that this node may not search
    while not os.path.exists(file):  # noqa: PTH110
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError):  # there is no such folder here, or it may not be read
            os.listdir(file.parent)  # noqa: PTH208  refreshes NFS's cache; exists() does not
        time.sleep(0.05)
    return True
