"""The rendezvous of a Slurm job's nodes, tested before training: a node that fails is named.

    python -m launch.rendezvous port --seed 4711           a free port below the kernel's ephemeral range
    python -m launch.rendezvous meet --node n2 --nodes …   on each node; the head prints the common address
    python -m launch.rendezvous here --towards 10.0.0.1    this host's address and interface on that route

It imports neither torch nor Slurm, and so takes a tenth of a second: slurm/node.sh passes Slurm's facts as
flags.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp.dist.addresses import address_towards, interface_of, listen

FIRST_PORT, PORTS = 20000, 12000  # the kernel's own outgoing connections start at 32768
RETRY_S = 0.2
HEAD_WAITS_LONGER_S = 2.0  # so that the node that cannot connect prints its error first


def free_port(seed: int) -> int:
    """A free port. Each seed tries its own sequence of ports, so neighbouring jobs rarely collide."""
    for attempt in range(PORTS):
        port = FIRST_PORT + (seed + attempt * 397) % PORTS
        with contextlib.suppress(OSError), listen(port, 1):  # taken: the next
            return port
    raise SystemExit(f"no free port from {FIRST_PORT} to {FIRST_PORT + PORTS - 1} on {socket.gethostname()}.")


def here(towards: str) -> tuple[str, str]:
    """This host's address on the route to another, and its network interface."""
    address = address_towards(towards)
    if not address:
        raise SystemExit(f"{socket.gethostname()} has no route to {towards}.")
    return address, interface_of(address) or "lo"


# ---------------------------------------------------------------- the meeting


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """One start's rendezvous. `hosts` are names or addresses of the head, preferred first."""

    hosts: Sequence[str]
    port: int
    token: str
    nodes: Sequence[str]
    timeout_s: float

    def addresses(self) -> str:
        return " or ".join(f"{host}:{self.port}" for host in self.hosts)


@dataclass
class Arrivals:
    """The head's list of nodes: the host that each used, and the head's address that it reached."""

    meeting: Meeting
    came: dict[str, dict[str, str]] = field(default_factory=dict)
    gpus: dict[str, int] = field(default_factory=dict)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def enter(self, hello: dict[str, Any], address: str) -> None:
        self.came.setdefault(hello["host"], {})[hello["node"]] = address
        self.gpus[hello["node"]] = hello["gpus"]
        if self.address() is not None:
            self.over.set()

    def address(self) -> str | None:
        """The numeric address of the head that every node reached, preferably as another node sees it."""
        for host in self.meeting.hosts:
            seen = self.came.get(host, {})
            if set(self.meeting.nodes) <= set(seen):
                others = [seen[node] for node in self.meeting.nodes[1:]]
                return (others or [seen[self.meeting.nodes[0]]])[0]
        return None

    def problem(self) -> str:
        """An error that names the missing nodes, or the nodes of each host if they used different ones."""
        here = {node for seen in self.came.values() for node in seen}
        head, missing = self.meeting.nodes[0], [node for node in self.meeting.nodes if node not in here]
        if missing:
            where = f"{head} at {self.meeting.addresses()}"
            return f"{', '.join(missing)} did not reach {where} within {self.meeting.timeout_s:.0f} s."
        ways = "; ".join(f"{host} by {', '.join(sorted(seen))}" for host, seen in self.came.items())
        return f"no address of {head} is reached by all nodes: {ways}."


async def lead(meeting: Meeting) -> Arrivals:
    """On the head: listen until every node has connected by one common host, then reply to all of them."""
    arrivals, callers = Arrivals(meeting), set[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        callers.add(task)
        # a connection without the token is ignored: port scanners connect too
        foreign = (OSError, ValueError, RecursionError, EOFError, asyncio.LimitOverrunError)
        with contextlib.suppress(*foreign, asyncio.CancelledError):
            hello = json.loads(await reader.readuntil())
            if _is_hello(hello) and hello["token"] == meeting.token:
                arrivals.enter(hello, str(writer.get_extra_info("sockname")[0]).removeprefix("::ffff:"))
                await arrivals.over.wait()
                if arrivals.address() is not None:
                    writer.write(b"go\n")
                    # the caller closes first: the port has no TIME_WAIT then
                    await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, sock=listen(meeting.port, 4096))
    async with server:
        with contextlib.suppress(TimeoutError):  # `arrivals` has the missing nodes
            await asyncio.wait_for(arrivals.over.wait(), meeting.timeout_s + HEAD_WAITS_LONGER_S)
        arrivals.over.set()
        if callers:
            await asyncio.wait(callers, timeout=HEAD_WAITS_LONGER_S)
    return arrivals


def _is_hello(message: Any) -> bool:
    texts = ("token", "node", "host")
    return (
        isinstance(message, dict)
        and all(type(message.get(name)) is str for name in texts)
        and type(message.get("gpus")) is int
    )


async def come(meeting: Meeting, node: str, gpus: int) -> dict[str, str] | None:
    """On every node: try each host until one replies. None on success, else the answer of each host."""
    answers = dict.fromkeys(meeting.hosts, "no answer")
    callers = [asyncio.create_task(_call(meeting, host, node, gpus, answers)) for host in meeting.hosts]
    done, rest = await asyncio.wait(callers, timeout=meeting.timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for caller in rest:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    return None if done else answers


async def _call(meeting: Meeting, host: str, node: str, gpus: int, answers: dict[str, str]) -> None:
    hello = json.dumps({"token": meeting.token, "node": node, "host": host, "gpus": gpus}).encode()
    while True:
        # the connection was closed: another job's head, or its time-out
        with contextlib.suppress(asyncio.IncompleteReadError):
            try:
                reader, writer = await asyncio.open_connection(host, meeting.port)
                answers[host] = "reached"
                with contextlib.closing(writer):
                    writer.write(hello + b"\n")
                    if await reader.readuntil() == b"go\n":
                        return
            except OSError as error:
                answers[host] = _reason(error)
        await asyncio.sleep(RETRY_S)


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "the name does not resolve"
    return os.strerror(error.errno).lower() if error.errno else str(error)


async def meet(meeting: Meeting, node: str, gpus: int, ranks: int) -> int:
    """Run the rendezvous on this node; returns the exit status. The head prints the address to stdout."""
    if node != meeting.nodes[0]:
        return _report(meeting, node, await come(meeting, node, gpus))
    arrivals, _ = await asyncio.gather(lead(meeting), come(meeting, node, gpus))
    address = arrivals.address()
    if address is None:
        return _fail(
            f"{arrivals.problem()}",
            "set RDZV_HOST in slurm/cluster.env to an address of the first node that all reach",
        )
    too_few = [f"{name} has {count}" for name, count in sorted(arrivals.gpus.items()) if 0 <= count < ranks]
    if too_few:
        most = min(count for count in arrivals.gpus.values() if count >= 0)
        return _fail(
            f"{len(meeting.nodes)} nodes × {ranks} ranks need {ranks} GPUs a node, but {', '.join(too_few)}.",
            f"NPROC_PER_NODE={most} sbatch …",
        )
    more = [f"{name} has {count}" for name, count in sorted(arrivals.gpus.items()) if count > ranks]
    if more and len({*arrivals.gpus.values()}) > 1:
        line = f"{ranks} ranks a node, but {', '.join(more)} GPUs: the others are unused."
        print(f"{line} HINT: nodes of one kind, as by sbatch --constraint", file=sys.stderr)
    print(address, flush=True)
    return 0


def _report(meeting: Meeting, node: str, answers: dict[str, str] | None) -> int:
    if answers is None:
        return 0
    if "reached" not in answers.values():
        reasons = ", ".join(f"{host}:{meeting.port} {answer}" for host, answer in answers.items())
        print(
            f"{node} cannot reach {meeting.nodes[0]} within {meeting.timeout_s:.0f} s: {reasons}.",
            file=sys.stderr,
        )
    return 1


def _fail(message: str, hint: str) -> int:
    print(f"rendezvous: {message} HINT: {hint}", file=sys.stderr, flush=True)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launch.rendezvous", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("port").add_argument("--seed", type=int, required=True)
    commands.add_parser("here").add_argument("--towards", required=True)
    one = commands.add_parser("meet")
    one.add_argument("--node", required=True, help="this node's name")
    one.add_argument("--nodes", required=True, help="all nodes, separated by commas, the head first")
    one.add_argument(
        "--hosts", required=True, help="names or addresses of the head, separated by commas, preferred first"
    )
    one.add_argument("--port", type=int, required=True)
    one.add_argument("--token", required=True, help="a secret of this start of this job")
    one.add_argument("--timeout-s", type=float, default=60.0)
    one.add_argument("--gpus", type=int, default=-1, help="number of GPUs on this node; -1 skips the check")
    one.add_argument("--ranks", type=int, default=1, help="number of ranks on each node")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.command == "port":
        print(free_port(options.seed))
    elif options.command == "here":
        print(*here(options.towards))
    else:
        meeting = Meeting(
            hosts=options.hosts.split(","),
            port=options.port,
            token=options.token,
            nodes=options.nodes.split(","),
            timeout_s=options.timeout_s,
        )
        return asyncio.run(meet(meeting, options.node, options.gpus, options.ranks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
