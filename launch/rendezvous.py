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

from fsdp.dist.network import address_towards, interface_of, is_loopback, listen

FIRST_PORT, PORTS = 20000, 12000  # the kernel's own outgoing connections start at 32768
RETRY_S = 0.2
HOST = 100
"""More than the addresses of a name: the order of preference counts hosts in hundreds."""
PREFERRED_S = 2.0
"""Ten tries, and a repeated SYN: an address that a node has not reached this long after all could meet by
another has failed there.
"""
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
        where = "on its loopback" if interface else "on no interface"
        raise SystemExit(
            f"{address}, the address of {host} on the route to {towards}, is {where}: gloo reaches no other "
            "node by it. HINT: export GLOO_SOCKET_IFNAME=INTERFACE in slurm/cluster.env; `ip addr` lists them"
        )
    return address, interface


# ---------------------------------------------------------------- the meeting


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """One start's rendezvous. `hosts` are names or addresses of the head, preferred first."""

    hosts: Sequence[str]
    port: int
    token: str
    nodes: Sequence[str]
    timeout_s: float


@dataclass
class Arrivals:
    """The head's list of the other nodes: by which of its addresses each came, the head's order of preference
    with each address.
    """

    meeting: Meeting
    ways: dict[str, dict[str, int]] = field(default_factory=dict)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def enter(self, node: str, address: str, order: int) -> None:
        ways = self.ways.setdefault(node, {})
        ways[address] = min(order, ways.get(address, order))
        best = self.address()
        if best is not None and self.order(best) == 0:
            self.over.set()
        elif best is not None:
            # all could meet now: a node that reaches a preferred address does so before this
            asyncio.get_running_loop().call_later(PREFERRED_S, self.over.set)

    def address(self) -> str | None:
        """The preferred one of the head's numeric addresses that every other node reached."""
        reached = [set(self.ways.get(node, ())) for node in self.meeting.nodes[1:]]
        return min(set.intersection(*reached), key=lambda way: (self.order(way), way), default=None)

    def order(self, address: str) -> int:
        return max(ways[address] for ways in self.ways.values() if address in ways)

    def problem(self) -> str:
        """An error that names the missing nodes, or the addresses that each node used."""
        head, *others = self.meeting.nodes
        missing = [node for node in others if node not in self.ways]
        if missing:
            hosts = " or ".join(f"{host}:{self.meeting.port}" for host in self.meeting.hosts)
            return (
                f"{', '.join(missing)} did not reach {head} at {hosts} within {self.meeting.timeout_s:.0f} s."
            )
        ways = "; ".join(f"{node} by {', '.join(self.ways[node])}" for node in others)
        return f"no address of {head} is reached by all nodes: {ways}."


async def lead(meeting: Meeting) -> Arrivals:
    """On the head: listen until every node has come by one common address, then reply to all of them."""
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
                address = str(writer.get_extra_info("sockname")[0]).removeprefix("::ffff:")
                arrivals.enter(hello["node"], address, hello["order"])
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
    kinds = {"token": str, "node": str, "order": int}
    return isinstance(message, dict) and all(type(message.get(name)) is kinds[name] for name in kinds)


async def come(meeting: Meeting, node: str) -> dict[str, str] | None:
    """On another node: try all addresses of each host until the head replies. None on success, else the
    answer of each.
    """
    answers = dict.fromkeys(meeting.hosts, "no answer")
    met = asyncio.Event()

    async def visit(host: str, order: int, callers: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                entries = await loop.getaddrinfo(host, meeting.port, type=socket.SOCK_STREAM)
                break
            except OSError:
                answers[host] = "the name does not resolve"
                await asyncio.sleep(RETRY_S)
        for place, address in enumerate(dict.fromkeys(str(where[0]) for *_, where in entries)):
            callers.create_task(call(host, address, HOST * order + place))

    async def call(host: str, address: str, order: int) -> None:
        hello = json.dumps({"token": meeting.token, "node": node, "order": order}).encode()
        while True:
            # the connection was closed: another job's head, or its time-out
            with contextlib.suppress(asyncio.IncompleteReadError):
                try:
                    reader, writer = await asyncio.open_connection(address, meeting.port)
                    answers[host] = "reached"
                    with contextlib.closing(writer):
                        writer.write(hello + b"\n")
                        if await reader.readuntil() == b"go\n":
                            met.set()
                            return
                except OSError as error:
                    answers[host] = os.strerror(error.errno).lower() if error.errno else str(error)
            await asyncio.sleep(RETRY_S)

    async def search() -> None:
        async with asyncio.TaskGroup() as callers:
            for order, host in enumerate(meeting.hosts):
                callers.create_task(visit(host, order, callers))

    searching = asyncio.create_task(search())
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(met.wait(), meeting.timeout_s)
    searching.cancel()
    await asyncio.wait([searching])
    return None if met.is_set() else answers


async def meet(meeting: Meeting, node: str) -> int:
    """Run the rendezvous on this node; returns the exit status. The head prints the address to stdout."""
    head, *others = meeting.nodes
    if not others:
        print("127.0.0.1", flush=True)
        return 0
    if node != head:
        return _report(meeting, node, await come(meeting, node))
    arrivals = await lead(meeting)
    address = arrivals.address()
    if address is None:
        hint = "set RDZV_HOST in slurm/cluster.env to an address of the first node that all reach"
        print(f"rendezvous: {arrivals.problem()} HINT: {hint}", file=sys.stderr, flush=True)
        return 1
    if arrivals.order(address) >= HOST:
        absent = ", ".join(node for node in others if min(arrivals.ways[node].values()) >= HOST)
        line = f"rendezvous: {absent} did not reach {head} at {meeting.hosts[0]}: the nodes meet at {address}"
        print(line, file=sys.stderr)
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
        return asyncio.run(meet(meeting, options.node))
    return 0


if __name__ == "__main__":
    sys.exit(main())
