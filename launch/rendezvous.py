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
from dataclasses import dataclass
from operator import itemgetter
from typing import cast

from fsdp.dist.network import address_towards, interface_of, is_loopback, listen

FIRST_PORT, PORTS = 20000, 12000  # the kernel's own outgoing connections start at 32768
RETRY_S = 0.2
PROBE_S = 2.0
"""Ten tries, and a repeated SYN: an address of a listening head that has not answered by then has failed."""
HEAD_WAITS_LONGER_S = 2.0  # so that the node that cannot connect prints its error first
HOST = 100
"""More than the addresses of a name: the order of preference counts hosts in hundreds."""


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
        fault = "on its loopback" if interface else "on no interface"
        raise SystemExit(
            f"{address}, the address of {host} on the route to {towards}, is {fault}: gloo reaches no other "
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


Ways = dict[str, dict[str, int]]
"""The other nodes: the addresses of the head that each has reached, with their order of preference."""


def common_address(ways: Ways) -> tuple[int, str] | None:
    """The preferred one of the head's addresses that every node has reached, behind its order."""
    reached = set.intersection(*map(set, ways.values()))
    return min(((max(way[each] for way in ways.values()), each) for each in reached), default=None)


async def lead(meeting: Meeting) -> Ways:
    """On the head: listen until every node has come or the time is over, then reply to all if they have an
    address in common.
    """
    ways: Ways = {}
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
                if others <= ways.keys():
                    over.set()
                await over.wait()
                if others <= ways.keys() and common_address(ways):
                    writer.write(b"go\n")
                    await reader.read()  # the caller closes first: the port has no TIME_WAIT then
        writer.close()

    server = await asyncio.start_server(serve, sock=listen(meeting.port, 4096))
    async with server:
        with contextlib.suppress(TimeoutError):  # `ways` lacks the missing nodes
            await asyncio.wait_for(over.wait(), meeting.timeout_s + HEAD_WAITS_LONGER_S)
        over.set()
        if callers:
            await asyncio.wait(callers, timeout=HEAD_WAITS_LONGER_S)
    return ways


async def come(meeting: Meeting, node: str) -> dict[str, str] | None:
    """On another node: connect to all addresses of the head, name those reached, and wait for its reply. None
    on success, else the answer of each host.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + meeting.timeout_s
    answers = dict.fromkeys(meeting.hosts, "no answer")
    streams: dict[str, tuple[int, asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def visit(host: str, order: int, limit_s: float) -> None:
        try:
            lookup = loop.getaddrinfo(host, meeting.port, type=socket.SOCK_STREAM)
            addresses = [str(address[0]) for *_, address in await asyncio.wait_for(lookup, limit_s)]
        except OSError:
            answers[host] = "the name does not resolve"
            return
        numbered = enumerate(dict.fromkeys(addresses), HOST * order)
        await asyncio.gather(*(connect(host, address, number, limit_s) for number, address in numbered))

    async def connect(host: str, address: str, order: int, limit_s: float) -> None:
        try:
            stream = await asyncio.wait_for(asyncio.open_connection(address, meeting.port), limit_s)
            streams.setdefault(address, (order, *stream))
            answers[host] = "reached"
        except OSError as error:
            if not any(order // HOST == other[0] // HOST for other in streams.values()):
                answers[host] = os.strerror(error.errno).lower() if error.errno else "no answer"

    listens = False
    while (left := deadline - loop.time()) > 0:
        streams.clear()
        hosts = enumerate(meeting.hosts)
        await asyncio.gather(*(visit(host, order, min(PROBE_S, left)) for order, host in hosts))
        # an address counts as failed only if the head was listening: hence the second round
        if listens and streams:
            reached = {address: order for address, (order, _, _) in streams.items()}
            _, reader, writer = min(streams.values(), key=itemgetter(0))
            hello = {"token": meeting.token, "node": node, "reached": reached}
            # no reply: another job's head, its time-out, or no address in common
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                writer.write(json.dumps(hello).encode() + b"\n")
                await asyncio.wait_for(reader.readuntil(), deadline - loop.time() + HEAD_WAITS_LONGER_S)
                answers.clear()
        for _, _, writer in streams.values():
            writer.close()
        if not answers:
            return None
        listens = bool(streams)
        await asyncio.sleep(RETRY_S)
    return answers


async def meet(meeting: Meeting, node: str) -> int:
    """Run the rendezvous on this node; returns the exit status. The head prints the address to stdout."""
    head, *others = meeting.nodes
    if not others:
        print("127.0.0.1", flush=True)
        return 0
    if node != head:
        return _report(meeting, node, await come(meeting, node))
    ways = await lead(meeting)
    if missing := [other for other in others if other not in ways]:
        hosts = " or ".join(f"{host}:{meeting.port}" for host in meeting.hosts)
        problem = f"{', '.join(missing)} did not reach {head} at {hosts} within {meeting.timeout_s:.0f} s."
    elif (common := common_address(ways)) is None:
        reached = "; ".join(f"{other} by {', '.join(ways[other])}" for other in others)
        problem = f"no address of {head} is reached by all nodes: {reached}."
    else:
        order, address = common
        if order >= HOST:
            absent = ", ".join(other for other in others if min(ways[other].values()) >= HOST)
            line = f"{absent} did not reach {head} at {meeting.hosts[0]}: the nodes meet at {address}"
            print(f"rendezvous: {line}", file=sys.stderr)
        print(address, flush=True)
        return 0
    hint = "set RDZV_HOST in slurm/cluster.env to an address of the first node that all reach"
    print(f"rendezvous: {problem} HINT: {hint}", file=sys.stderr, flush=True)
    return 1


def _report(meeting: Meeting, node: str, answers: dict[str, str] | None) -> int:
    if answers is None:
        return 0
    if "reached" not in answers.values():
        reasons = ", ".join(f"{host}:{meeting.port} {answer}" for host, answer in answers.items())
        line = f"{node} cannot reach {meeting.nodes[0]} within {meeting.timeout_s:.0f} s: {reasons}."
        print(line, file=sys.stderr)
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.rendezvous", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("port").add_argument("--seed", type=int, required=True)
    commands.add_parser("here").add_argument("--towards", required=True)
    words = commands.add_parser("meet")
    for name in ("node", "nodes", "hosts", "port", "token", "timeout-s"):  # the head and its address first
        words.add_argument(f"--{name}", required=True)
    options = parser.parse_args(argv)
    if options.command == "port":
        print(free_port(options.seed))
    elif options.command == "here":
        print(*here(options.towards))
    else:
        meeting = Meeting(
            hosts=options.hosts.split(","),
            port=int(options.port),
            token=options.token,
            nodes=options.nodes.split(","),
            timeout_s=float(options.timeout_s),
        )
        return asyncio.run(meet(meeting, options.node))
    return 0


if __name__ == "__main__":
    sys.exit(main())
