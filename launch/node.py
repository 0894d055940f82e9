"""What slurm/node.sh starts on a node of a Slurm job, inside the container:

    python -m launch.node meet                the nodes' rendezvous; the head prints the common address
    python -m launch.node rank COMMAND…       a command, with gloo's interface on the route to MASTER_ADDR
    python -m launch.node ranks train.py …    the same for one rank of srun, or torchrun for a node's ranks
    python -m launch.node ray                 the node of a Ray cluster, until SIGUSR2

The nodes meet before training, so that one that fails is named, by an address and in a folder that all
share; then torchrun's rendezvous is static, with ranks in Slurm's order of the nodes. Under --dry-run a node
also prints what it has. torchrun ends with the exit code of the rank that failed first, which it names in one
line: the rank has printed its own error, and torchrun itself would print a traceback after it, on each node,
and end with 1. Variables come from slurm/lib.sh; torch is imported by `ranks` and the check alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, cast

from fsdp.base import proc
from fsdp.base.errors import ShardrunError
from fsdp.distributed import env
from fsdp.distributed.env import address_towards, interface_of, is_loopback, listen

FIRST_PORT, PORTS = 20000, 12000  # the kernel's own outgoing connections start at 32768
RETRY_S = 0.2
PROBE_S = 2.0
"""Ten tries, and a repeated SYN: an address of a listening head that has not answered by then has failed."""
HEAD_WAITS_LONGER_S = 2.0  # so that the node that cannot connect prints its error first


def free_port(seed: int) -> int:
    """A free port. Each seed tries its own sequence of ports, so neighbouring jobs rarely collide."""
    for attempt in range(PORTS):
        port = FIRST_PORT + (seed + attempt * 397) % PORTS
        with contextlib.suppress(OSError), listen(port, 1):  # taken: the next
            return port
    raise SystemExit(f"no free port from {FIRST_PORT} to {FIRST_PORT + PORTS - 1} on {socket.gethostname()}.")


def here(towards: str) -> tuple[str, str]:
    """This host's address on the route to another, and the network interface for gloo."""
    host, address = socket.gethostname(), address_towards(towards)
    if not address:
        raise SystemExit(f"{host} has no route to {towards}.")
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(address)
    if interface in ("", "lo") and not is_loopback(address):
        raise SystemExit(
            f"{address}, this host's address on the route to {towards}, is on {interface or 'no interface'}:"
            " gloo reaches no other node by it. HINT: export GLOO_SOCKET_IFNAME=INTERFACE in "
            "slurm/cluster.env; `ip addr` lists them"
        )
    return address, interface


# ---------------------------------------------------------------- the rendezvous


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """One start's rendezvous. `hosts` are names or addresses of the head, preferred first."""

    hosts: Sequence[str]
    port: int
    token: str
    nodes: Sequence[str]
    timeout_s: float
    shared: Path | None = None
    """The run directory, or the nearest folder above it that is there."""

    @property
    def probe(self) -> Path | None:
        """Written by the head before it listens: a node that does not see it shares no folder."""
        return self.shared / f".meeting-{self.token}" if self.shared else None


Ways = dict[str, list[str]]
"""The other nodes: the addresses of the head that each has reached, preferred first."""


def common_address(ways: Ways) -> str | None:
    """The preferred one of the head's addresses that every node has reached."""
    first, *others = ways.values()
    return next((address for address in first if all(address in other for other in others)), None)


async def lead(meeting: Meeting) -> tuple[Ways, list[str]]:
    """On the head: listen until every node has come or the time is over, then reply to all if they have an
    address in common and see the shared folder. Returns also the nodes that do not see it.
    """
    ways: Ways = {}
    blind: list[str] = []
    callers, over = set[asyncio.Task[None]](), asyncio.Event()
    others = set(meeting.nodes[1:])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callers.add(cast("asyncio.Task[None]", asyncio.current_task()))
        # a connection without the token is ignored: port scanners connect too
        foreign = (OSError, ValueError, RecursionError, EOFError, asyncio.LimitOverrunError)
        with contextlib.suppress(*foreign, asyncio.CancelledError):
            hello = json.loads(await reader.readuntil())
            if isinstance(hello, dict) and hello.get("token") == meeting.token:
                ways[hello["node"]] = hello["reached"]
                if not hello.get("sees", True):
                    blind.append(hello["node"])
                if others <= ways.keys():
                    over.set()
                await over.wait()
                if others <= ways.keys() and common_address(ways):
                    writer.write(b"no\n" if blind else b"go\n")
                    await reader.read()  # the caller closes first: the port has no TIME_WAIT then
        writer.close()

    server = await asyncio.start_server(serve, sock=listen(meeting.port, 4096))
    async with server:
        with contextlib.suppress(TimeoutError):  # `ways` lacks the missing nodes
            await asyncio.wait_for(over.wait(), meeting.timeout_s + HEAD_WAITS_LONGER_S)
        over.set()
        if callers:
            await asyncio.wait(callers, timeout=HEAD_WAITS_LONGER_S)
    return ways, blind


def reach(meeting: Meeting, limit_s: float) -> tuple[dict[str, socket.socket], dict[str, str]]:
    """Connections to the head's addresses that have answered, preferred first; and each host's answer."""
    streams, answers = dict[str, socket.socket](), dict.fromkeys(meeting.hosts, "no answer")
    for host in meeting.hosts:
        try:
            found = socket.getaddrinfo(host, meeting.port, type=socket.SOCK_STREAM)
        except OSError:
            answers[host] = "the name does not resolve"
            continue
        for address in dict.fromkeys(str(place[0]) for *_, place in found):
            try:
                if address not in streams:
                    streams[address] = socket.create_connection((address, meeting.port), limit_s)
                answers[host] = "reached"
            except OSError as error:
                if error.errno and answers[host] != "reached":
                    answers[host] = os.strerror(error.errno).lower()
    return streams, answers


def come(meeting: Meeting, node: str) -> dict[str, str] | None:
    """On another node: connect to all addresses of the head, name those reached, and wait for its reply. None
    on success, else the answer of each host.
    """
    deadline = time.monotonic() + meeting.timeout_s
    answers, listens = dict.fromkeys(meeting.hosts, "no answer"), False
    while (left := deadline - time.monotonic()) > 0:
        streams, answers = reach(meeting, min(PROBE_S, left))
        with contextlib.ExitStack() as stack:
            for stream in streams.values():
                stack.enter_context(stream)
            # an address counts as failed only if the head was listening: hence the second round
            left = deadline - time.monotonic()
            reply = _greet(meeting, node, streams, left) if listens and streams else b""
            if reply.startswith(b"no"):  # the head says why
                return dict.fromkeys(answers, "reached")
            if reply:
                if answers[preferred := meeting.hosts[0]] != "reached":
                    line = f"{node} did not reach {meeting.nodes[0]} at {preferred}: the nodes meet elsewhere"
                    print(f"rendezvous: {line}", file=sys.stderr)
                return None
        listens = bool(streams)
        time.sleep(RETRY_S)
    return answers


def _greet(meeting: Meeting, node: str, streams: dict[str, socket.socket], left_s: float) -> bytes:
    """The head's reply. There is none from another job's, at its time-out, and where the nodes have no
    address in common.
    """
    stream = next(iter(streams.values()))
    sees = meeting.probe is None or meeting.probe.exists()
    hello = {"token": meeting.token, "node": node, "reached": [*streams], "sees": sees}
    with contextlib.suppress(OSError):
        stream.settimeout(max(left_s, 0) + HEAD_WAITS_LONGER_S)
        stream.sendall(json.dumps(hello).encode() + b"\n")
        return stream.recv(3)
    return b""


async def meet(meeting: Meeting, node: str) -> int:
    """Run the rendezvous on this node; returns the exit status. The head prints the address to stdout, or a
    line `failed NODE` for each node that did not come.
    """
    head, *others = meeting.nodes
    if not others:
        print("127.0.0.1", flush=True)
        return 0
    limit = f"within {meeting.timeout_s:.0f} s"
    if node != head:
        answers = await asyncio.to_thread(come, meeting, node)
        if answers is not None and "reached" not in answers.values():
            reasons = ", ".join(f"{host}:{meeting.port} {answer}" for host, answer in answers.items())
            print(f"{node} cannot reach {head} {limit}: {reasons}.", file=sys.stderr)
        return int(answers is not None)
    try:
        if meeting.probe:
            meeting.probe.touch()
        ways, blind = await lead(meeting)
    except OSError as error:
        print(f"{head} cannot write into {meeting.shared}: {error.strerror}", file=sys.stderr)
        return 1
    finally:
        if meeting.probe:
            meeting.probe.unlink(missing_ok=True)
    hint = "set RDZV_HOST in slurm/cluster.env to an address of the first node that all reach"
    if missing := [other for other in others if other not in ways]:
        print(*(f"failed {other}" for other in missing), sep="\n", flush=True)
        hosts = " or ".join(f"{host}:{meeting.port}" for host in meeting.hosts)
        problem = f"{', '.join(missing)} did not reach {head} at {hosts} {limit}."
    elif blind:
        problem = f"{', '.join(sorted(blind))} does not see what {head} wrote into {meeting.shared}."
        hint = "a --run.dir that all nodes share, mounted there too"
    elif (address := common_address(ways)) is None:
        reached = "; ".join(f"{other} by {', '.join(ways[other])}" for other in others)
        problem = f"no address of {head} is reached by all nodes: {reached}."
    else:
        print(address, flush=True)
        return 0
    print(f"rendezvous: {problem} HINT: {hint}", file=sys.stderr, flush=True)
    return 1


# ---------------------------------------------------------------- the ranks


def torchrun_flags(environ: Mapping[str, str]) -> list[str]:
    """A static rendezvous at the address where the nodes have met."""
    return [
        f"--nnodes={environ['SLURM_STEP_NUM_NODES']}",
        f"--node-rank={environ['SLURM_NODEID']}",
        f"--nproc-per-node={environ['SHARDRUN_RANKS_PER_NODE']}",
        f"--master-addr={environ['MASTER_ADDR']}",
        f"--master-port={environ['MASTER_PORT']}",
        "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT",
        *(["--tee=3", f"--log-dir={environ['SHARDRUN_RUN']}/logs/ranks"] if trains(environ) else []),
        *shlex.split(environ.get("SHARDRUN_TORCHRUN_ARGS", "")),
    ]


def trains(environ: Mapping[str, str]) -> bool:
    return environ.get("SHARDRUN_MODE", "train") == "train"


def torchrun(argv: Sequence[str]) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # torchrun's own report of the same failure, in this process alone
    try:
        run.run(run.parse_args(list(argv)))
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        code = first.exitcode
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        print(f"torchrun: rank {rank} ended first on this node, with {how}", file=sys.stderr)
        return code if code >= 0 else 128 - code
    return 0


def ranks(argv: Sequence[str]) -> int:
    """The ranks of this node, or one rank where srun starts each."""
    environ = os.environ
    if environ["SHARDRUN_LAUNCHER"] != "torchrun":
        execute([sys.executable, *argv])
    # torchrun inserts the rank: the same prefix as that of srun --label
    environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "${rank}: "
    flags = torchrun_flags(environ)
    if environ.get("SHARDRUN_MODE") == "dry-run" and environ["SLURM_NODEID"] == "0":
        print(f"on each node, with its node rank: torchrun {shlex.join([*flags, *argv])}", flush=True)
    return torchrun([*flags, *argv])


def execute(argv: Sequence[str]) -> NoReturn:
    os.execvp(argv[0], list(argv))


# ---------------------------------------------------------------- Ray


def ray_node(environ: Mapping[str, str]) -> int:
    """This node's part of a Ray cluster, until SIGUSR2 says that the driver has ended: SIGTERM drains it."""
    address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    folder = tempfile.mkdtemp(prefix=f"ray-{environ['SLURM_JOB_ID']}-", dir="/tmp")
    role = [f"--address={address}:{port}"]
    if environ["SLURM_NODEID"] == "0":
        role = ["--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false"]
    deadline = time.monotonic() + float(environ["SHARDRUN_TIMEOUT_S"])
    while environ["SLURM_NODEID"] != "0" and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection((address, port), PROBE_S).close()
            break
        time.sleep(RETRY_S)
    # as many CPUs as ranks, so that each node gets an equal number of ranks
    cpus = f"--num-cpus={environ['SHARDRUN_RANKS_PER_NODE']}"
    command = [
        "ray",
        "start",
        "--block",
        f"--node-ip-address={here(address)[0]}",
        cpus,
        "--disable-usage-stats",
    ]
    process = subprocess.Popen([*command, *role], stdout=subprocess.DEVNULL)

    def end(*_: object) -> None:
        for pid in [*proc.children(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGUSR2, end)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    code = process.wait()
    shutil.rmtree(folder, ignore_errors=True)
    return code


# ---------------------------------------------------------------- the check of a node


def check(node: str, shared: Path, count: int) -> int:
    """Print what the node has, and its problems, for which the exit code is 1."""
    import torch

    problems = [] if os.access(shared, os.W_OK) else [f"{shared} cannot be written"]
    devices = "no device for a rank"
    try:
        env.check_gpus_are_seen()
        kinds = sorted({str(env.pick_device(rank)) for rank in range(count)})
        devices = f"{count} ranks on {', '.join(kinds)}"
    except ShardrunError as error:
        problems.append(str(error))
    python = f"Python {sys.version.split()[0]} at {sys.executable}"
    print(f"{node}: {devices}; {python}; torch {torch.__version__}; {shared} is shared", file=sys.stderr)
    for problem in problems:
        print(f"{node}: {problem}", file=sys.stderr)
    return 1 if problems else 0


def main(argv: Sequence[str]) -> int:
    command, variables = argv[0], os.environ
    if command == "ray":
        return ray_node(variables)
    if command in ("rank", "ranks"):
        # c10d warns in C++ of names that do not resolve and of a store that has ended
        variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        _, variables["GLOO_SOCKET_IFNAME"] = here(variables["MASTER_ADDR"])
        return ranks(argv[1:]) if command == "ranks" else execute(argv[1:])
    if command != "meet":
        raise SystemExit(f"{command} is neither meet, rank, ranks nor ray.")
    node, shared = variables["SLURMD_NODENAME"], Path(variables["SHARDRUN_SHARED"])
    mode = variables.get("SHARDRUN_MODE")
    meeting = Meeting(
        hosts=[*dict.fromkeys(variables["SHARDRUN_HOSTS"].split(","))],
        port=int(variables["MASTER_PORT"]),
        token=variables["SHARDRUN_TOKEN"],
        nodes=variables["SHARDRUN_NODES"].split(),
        timeout_s=float(variables["SHARDRUN_TIMEOUT_S"]),
        shared=None if mode == "preflight" else shared,  # the doctor names such a node itself
    )
    code = asyncio.run(meet(meeting, node))
    if code == 0 and mode == "dry-run":
        return check(node, shared, int(variables["SHARDRUN_RANKS_PER_NODE"]))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
