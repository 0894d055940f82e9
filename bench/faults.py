"""Faults injected into four ranks: does the watch report the right rank and kind, and how soon?

    python -m bench.faults [--times N] [--kinds SIGKILL,"slow storage"]
                                              each kind N times at a random step and rank
    python -m bench.faults --times N --keep
                                              the same, added to bench/results/faults.{json,md}

Each case is a real run of four rank processes, forked from this one to avoid import time. The partitioned
node is a network namespace (needs root) whose link is taken down, or whose packets are lost on their way to
the first node; the killed node is one whose processes are all killed; of the flooded monitor see flood().
Seconds count from the fault to the verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.fault_kinds import KINDS, Kind, NodeFault, Where
from bench.fault_runs import RANKS, end_all, ended, fork_rank, import_once, steps_of, verdict_of, wait_for
from bench.processes import free_port
from bench.tables import RESULTS, machine, write
from fsdp.base import proc

FLAGS = (
    "--model.name", "mlp", "--model.args.hidden", "64", "--data.name", "digits", "--train.steps", "100000",
    "--train.global_batch", "16", "--checkpoint.every_steps", "4", "--checkpoint.export", "false",
    "--data.workers", "1",
)  # fmt: skip


@dataclass
class Case:
    """An injected fault and the reported verdict."""

    kind: str
    rank: int
    step: int
    said_kind: str = ""
    said_ranks: list[int] = field(default_factory=list)
    what: str = ""
    seconds: float = -1.0
    codes: list[int] = field(default_factory=list)

    def right(self, kind: Kind) -> bool:
        expected = {2, 3} if kind.two_nodes else {self.rank}
        return self.said_kind == kind.verdict and set(self.said_ranks) == expected


@contextmanager
def two_hosts(folder: Path) -> Iterator[Any]:
    """Two hosts with a link each to one bridge: (namespaces of host i, cut(way)). Needs root."""
    from tests.slurm.host import Host

    with ExitStack() as stack:
        hosts = []
        (folder / "hosts").write_text("127.0.0.1 localhost\n10.78.0.1 n1\n10.78.0.2 n2\n")
        for name in ("switch", "n1", "n2"):
            hosts.append(Host(name, folder / "hosts", folder / f"{name}.out", own_processes=False))
            stack.callback(hosts[-1].end)

        def ip(*words: str) -> None:
            subprocess.run(["nsenter", f"--net=/proc/{hosts[0].shell}/ns/net", "ip", *words], check=True)

        ip("link", "add", "bridge0", "type", "bridge")
        ip("link", "set", "bridge0", "up")
        for i, host in enumerate(hosts[1:], start=1):
            ip("link", "add", f"cable{i}", "type", "veth", "peer", "name", "eth0", "netns", str(host.shell))
            ip("link", "set", f"cable{i}", "master", "bridge0", "up")
            inside = ["nsenter", f"--net=/proc/{host.shell}/ns/net", "ip"]
            subprocess.run([*inside, "addr", "add", f"10.78.0.{i}/24", "dev", "eth0"], check=True)
            subprocess.run([*inside, "link", "set", "eth0", "up"], check=True)
        spaces = []
        for host in hosts[1:]:
            opened = [
                os.open(f"/proc/{host.shell}/ns/{space}", os.O_RDONLY) for space in ("net", "uts", "mnt")
            ]
            spaces.append(opened)
            for one in opened:
                stack.callback(os.close, one)

        def cut(way: NodeFault) -> None:
            if way is NodeFault.CABLE:
                ip("link", "set", "cable2", "down")
            else:  # to a hardware address that nobody has: no error is returned to the sender
                away = ("neigh", "replace", "10.78.0.1", "lladdr", "02:00:00:00:00:99", "nud", "permanent")
                subprocess.run([*inside, *away, "dev", "eth0"], check=True)

        yield spaces, cut


# ---------------------------------------------------------------- one case


def once(kind: Kind, rank: int, step: int, folder: Path, more: Sequence[str] = ()) -> Case:
    """One run with one fault, to its verdict, and to its end if the watch ends it."""
    case = Case(kind.name, rank, step)
    run, where = folder / "run", Where(rank, step, folder / "fault-at")
    flags = ["--run.dir", str(run), *FLAGS, *more]
    with ExitStack() as stack:
        spaces, cut = stack.enter_context(two_hosts(folder)) if kind.two_nodes else ([], None)
        address = ("10.78.0.1" if kind.two_nodes else "127.0.0.1", free_port())
        pids = [
            fork_rank(
                r, address, flags, folder / "log", kind, where, spaces[r // 2] if kind.two_nodes else ()
            )
            for r in range(RANKS)
        ]
        try:
            if cut is not None:
                wait_for(lambda: steps_of(run) >= step, "steps")
                where.now()
                if kind.node is NodeFault.FLOODED:
                    flood(pids, spaces[1][0])
                    wait_for(lambda: steps_of(run) >= step + 50, "steps after the flood")
                    for pid in pids[2:]:
                        os.kill(pid, signal.SIGSTOP)
                    where.now(again=True)
                else:
                    kill_node(pids[2:]) if kind.node is NodeFault.KILLED else cut(kind.node)
            said = wait_for(lambda: verdict_of(run), f"a verdict on {kind.name}")
            case.said_kind, case.said_ranks, case.what = said["kind"], said["ranks"], said["what"]
            case.seconds = said["time"] - float(where.heard.read_text())
            if kind.ends:
                case.codes = ended(pids, 20.0)
        finally:
            end_all(pids)
    return case


def kill_node(pids: Sequence[int]) -> None:
    """Kills its ranks, and the monitor that is a child of one of them; the node itself still answers."""
    for pid in [*(child for rank in pids for child in proc.children(rank)), *pids]:
        os.kill(pid, signal.SIGKILL)


FLOOD = """
import contextlib, socket, sys
address = ("10.78.0.1", int(sys.argv[1]))
line = socket.create_connection(address)
idle = [socket.create_connection(address) for _ in range(1100)]
with contextlib.suppress(OSError):  # it is closed
    line.sendall(b"x" * (60 << 20))
"""


def flood(pids: Sequence[int], space: int) -> None:
    """Idle connections and an endless line from the second node to the monitor of the first, which is then
    killed, as the kernel does for lack of memory, and started again.
    """
    [monitor] = proc.children(pids[0])
    listens = {f"socket:[{row[9]}]": row[1] for row in connections(monitor) if row[3] == "0A"}
    held = {str(one.readlink()) for one in Path(f"/proc/{monitor}/fd").iterdir()}
    [port] = {int(listens[name].rpartition(":")[2], 16) for name in held & listens.keys()}
    resource.prlimit(monitor, resource.RLIMIT_NOFILE, (1024, 1024))  # as most systems set it
    there = ["nsenter", f"--net=/proc/self/fd/{space}", sys.executable, "-c", FLOOD, str(port)]
    subprocess.run(there, pass_fds=(space,))
    assert proc.is_alive(monitor), "the flood has ended the monitor"
    os.kill(monitor, signal.SIGKILL)


def connections(pid: int) -> list[list[str]]:
    """The kernel's table of TCP sockets, as this process's network namespace has it."""
    tables = (Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6"))
    return [line.split() for table in tables for line in table.splitlines()[1:]]


def ending(kind: Kind) -> Kind:
    """The same, and waits for its end."""
    return replace(kind, ends=True)


def tried(kind: Kind, rank: int, step: int) -> Case:
    folder = Path(tempfile.mkdtemp(prefix="fault-"))
    try:
        case = once(kind, rank, step, folder)
    except TimeoutError as error:
        case = Case(kind.name, rank, step, what=f"no verdict: {error}")
    if not case.right(kind) or (kind.ends and len(case.codes) < RANKS):
        print(f"  WRONG {asdict(case)}\n{(folder / 'log').read_text(errors='replace')[-3000:]}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    return case


# ---------------------------------------------------------------- the table


def table(cases: Sequence[Case]) -> str:
    lines = [
        "| fault | called | times | right rank and kind | median s | worst s | e.g. |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        own = [case for case in cases if case.kind == kind.name]
        if own:
            right = sum(case.right(kind) for case in own)
            times = [case.seconds for case in own if case.seconds >= 0] or [float("nan")]
            lines.append(
                f"| {kind.name} | {kind.verdict} | {len(own)} | {right} | {statistics.median(times):.1f} | "
                f"{max(times):.1f} "
                f"| {own[-1].what[:110].replace('|', '/')} |"
            )
    by_name = {kind.name: kind for kind in KINDS}
    right = sum(case.right(by_name[case.kind]) for case in cases)
    times = [case.seconds for case in cases if case.seconds >= 0] or [float("nan")]
    lines.append(
        f"\n{right} of {len(cases)} right ({100 * right / len(cases):.1f}%); median "
        f"{statistics.median(times):.1f} s."
    )
    return "\n".join(lines)


def faults(options: argparse.Namespace) -> int:
    import_once()
    cases = kept() if options.keep else []
    chosen = [kind for kind in KINDS if not options.kinds or kind.name in options.kinds.split(",")]
    for number in range(options.times):
        for kind in chosen:
            if sum(case.kind == kind.name for case in cases) > number:
                continue
            dice = random.Random(f"{options.seed} {kind.name} {number}")
            case = tried(kind, dice.randrange(RANKS), dice.randrange(10, options.steps))
            cases.append(case)
            if options.keep:
                keep(cases, options)
            print(
                f"{number + 1}. {kind.name}, rank {case.rank}, step {case.step}: {case.seconds:.1f} s  "
                f"{case.what}",
                flush=True,
            )
    return summed_up(cases, options)


def kept() -> list[Case]:
    """The results of earlier calls."""
    file = RESULTS / "faults.json"
    return [Case(**one) for one in json.loads(file.read_text())["cases"]] if file.exists() else []


def keep(cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Writes after each case, so that an interrupted call loses one."""
    write(
        "faults",
        title="Injected faults: rank and kind reported, seconds to the verdict",
        command=f"python -m bench.faults --times {options.times} --keep",
        about=f"{RANKS} ranks, gloo, one machine with other work on it. {machine()}. "
        "Seconds from the fault to the verdict.",
        text=table(cases),
        numbers={"cases": [asdict(case) for case in cases]},
    )


def summed_up(cases: Sequence[Case], options: argparse.Namespace) -> int:
    print(table(cases))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(case) for case in cases]))
    by_name = {kind.name: kind for kind in KINDS}
    return 0 if all(case.right(by_name[case.kind]) for case in cases) else 1


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--kinds", default="", help="names, with commas between; empty is all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="add to what bench/results/faults.json holds")
    parser.add_argument("--steps", type=int, default=40, help="the fault comes between the 10th and this one")
    parser.add_argument("--json", type=Path, help="write the cases there")
    return faults(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
