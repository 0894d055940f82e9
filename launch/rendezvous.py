"""Where the ranks of a Slurm job meet: tried by every node before training starts, and blamed by name where
it fails.

    python -m launch.rendezvous port --seed 4711            a free port of this host, outside the kernel's own range
    python -m launch.rendezvous meet --node n2 --head n1 …   on every node; the head prints the address that all reached
    python -m launch.rendezvous here --towards 10.0.0.1     this host's address and interface on the way there

No torch and no Slurm in here: slurm/node.sh passes what it knows as flags, so the answer comes in a tenth of
a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FIRST_PORT, PORTS = 20000, 12000  # the kernel's own outgoing connections start at 32768
RETRY_S = 0.2
HEAD_WAITS_LONGER_S = 2.0  # so that the node that cannot get through speaks first
SIOCGIFADDR = 0x8915


def free_port(seed: int) -> int:
    """The same seed tries the same ports in the same order; another job's neighbouring seed starts elsewhere."""
    for attempt in range(PORTS):
        port = FIRST_PORT + (seed + attempt * 397) % PORTS
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError):  # taken: the next
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return port
    raise SystemExit(f"no free port from {FIRST_PORT} to {FIRST_PORT + PORTS - 1} on {socket.gethostname()}.")


def here(towards: str) -> tuple[str, str]:
    """This host's address on the way to another, and the interface that bears it. Nothing is sent."""
    family, kind, protocol, _, where = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
        probe.connect(where)
        address = str(probe.getsockname()[0])
    return address, _interface(address)


def _interface(address: str) -> str:
    for _, name in socket.if_nameindex():
        if address in (_address4(name), *_addresses6(name)):
            return name
    return "lo"


def _address4(name: str) -> str | None:
    with (
        contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe,
        contextlib.suppress(OSError),
    ):
        # one without such an address is an error to the kernel
        reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(reply[20:24])
    return None


def _addresses6(name: str) -> list[str]:
    table = Path("/proc/net/if_inet6")
    rows = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
    return [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows if row[-1] == name]


# ---------------------------------------------------------------- the meeting


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What all nodes of one start agree on: hosts are names or addresses of the head, the preferred first."""

    hosts: Sequence[str]
    port: int
    token: str
    nodes: Sequence[str]
    timeout_s: float

    def places(self) -> str:
        return " or ".join(f"{host}:{self.port}" for host in self.hosts)


@dataclass
class Roll:
    """The head's list: who came by which host, and at which of the head's addresses."""

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
        """The head's address, as a number, that every node reached; another node's view of it before the
        head's own.
        """
        for host in self.meeting.hosts:
            seen = self.came.get(host, {})
            if set(self.meeting.nodes) <= set(seen):
                others = [seen[node] for node in self.meeting.nodes[1:]]
                return (others or [seen[self.meeting.nodes[0]]])[0]
        return None

    def absent(self) -> str:
        """Who did not come, or, where each came by another way only, who by which."""
        here = {node for seen in self.came.values() for node in seen}
        head, missing = self.meeting.nodes[0], [node for node in self.meeting.nodes if node not in here]
        if missing:
            return f"{', '.join(missing)} did not reach {head} at {self.meeting.places()} within {self.meeting.timeout_s:.0f} s."
        ways = "; ".join(f"{host} by {', '.join(sorted(seen))}" for host, seen in self.came.items())
        return f"no address of {head} is reached by all nodes: {ways}."


async def lead(meeting: Meeting) -> Roll:
    """On the head: listen until every node has come by one and the same host, then tell all of them."""
    roll, callers = Roll(meeting), set[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        callers.add(task)
        # strangers knock too: whoever does not know the token is not listened to
        theirs = (OSError, ValueError, RecursionError, EOFError, asyncio.LimitOverrunError)
        with contextlib.suppress(*theirs, asyncio.CancelledError):
            hello = json.loads(await reader.readuntil())
            if isinstance(hello, dict) and hello.get("token") == meeting.token:
                roll.enter(hello, str(writer.get_extra_info("sockname")[0]).removeprefix("::ffff:"))
                await roll.over.wait()
                if roll.address() is not None:
                    writer.write(b"go\n")
                    # the caller closes first: the port is left without a TIME_WAIT of ours
                    await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, sock=_listen(meeting.port))
    async with server:
        with contextlib.suppress(TimeoutError):  # the roll says who has not come
            await asyncio.wait_for(roll.over.wait(), meeting.timeout_s + HEAD_WAITS_LONGER_S)
        roll.over.set()
        if callers:
            await asyncio.wait(callers, timeout=HEAD_WAITS_LONGER_S)
    return roll


def _listen(port: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=4096)


async def come(meeting: Meeting, node: str, gpus: int) -> dict[str, str] | None:
    """On every node: try each host until one of them says go. None, or what each host answered instead."""
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
        # it hung up: another job's, or its time is over
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
    """Both parts; a node's exit status. Only the head prints to stdout: the address that every node reached."""
    if node != meeting.nodes[0]:
        return _tell_other(meeting, node, await come(meeting, node, gpus))
    roll, _ = await asyncio.gather(lead(meeting), come(meeting, node, gpus))
    address = roll.address()
    if address is None:
        return _fail(
            f"{roll.absent()}",
            "set RDZV_HOST in slurm/cluster.env to an address of the first node that all reach",
        )
    poor = [f"{name} has {count}" for name, count in sorted(roll.gpus.items()) if 0 <= count < ranks]
    if poor:
        most = min(count for count in roll.gpus.values() if count >= 0)
        return _fail(
            f"{len(meeting.nodes)} nodes × {ranks} ranks need {ranks} GPUs a node, but {', '.join(poor)}.",
            f"NPROC_PER_NODE={most} sbatch …",
        )
    print(address, flush=True)
    return 0


def _tell_other(meeting: Meeting, node: str, answers: dict[str, str] | None) -> int:
    if answers is None:
        return 0
    if "reached" not in answers.values():
        said = ", ".join(f"{host}:{meeting.port} {answer}" for host, answer in answers.items())
        print(
            f"{node} cannot reach {meeting.nodes[0]} within {meeting.timeout_s:.0f} s: {said}.",
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
    one.add_argument("--nodes", required=True, help="all of them, a comma between, the head first")
    one.add_argument(
        "--hosts", required=True, help="names or addresses of the head, a comma between, the preferred first"
    )
    one.add_argument("--port", type=int, required=True)
    one.add_argument("--token", required=True, help="what only this start of this job knows")
    one.add_argument("--timeout-s", type=float, default=60.0)
    one.add_argument("--gpus", type=int, default=-1, help="that this node has; -1 does not check")
    one.add_argument("--ranks", type=int, default=1, help="that will run on each node")
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
