"""Checks whether these nodes can train together, and names those to exclude.

    torchrun --nproc_per_node=4 -m fsdp.doctor          or under srun; alone it starts a rank a GPU, or two
    sbatch slurm/fsdp.sbatch --preflight                in place of a job, on the job's nodes

It prints a table, its findings with a HINT each and a verdict, and writes DIR/doctor: doctor.txt,
doctor.json, and exclude, for sbatch's --exclude. Exit code 0 if all nodes are fit, 3 if one is not, 2 for a
wrong flag.
"""

# A rank publishes each measurement in the rendezvous store at once, so that rank 0 can report it even if a
# later stage hangs. A process group is only formed if every connection was possible.

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp.base.devices import set_thread_device
from fsdp.base.errors import LaunchError, first_line
from fsdp.base.text import print_answer, print_line
from fsdp.config.command_line import CommandParser, number, prints_errors, whole_number
from fsdp.distributed.env import DistEnv, address_towards, from_environment, listen, rendezvous_host, resolves
from fsdp.distributed.process_group import appears, facts_of, process_group, rendezvous_store
from fsdp.doctor import checks
from fsdp.doctor.checks import PRODUCT, NodeReports, can_form_group, faults, judge, text
from fsdp.rundir.history import write_atomically

NOT_FIT = LaunchError.exit_code
REPEATS = 2
"""A rank that seems slow may have been disturbed: all ranks measure again this often, and the best counts."""
END_S = 5.0


@prints_errors("fsdp.doctor")
def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fsdp.doctor", __doc__)
    add = parser.add_argument
    add("--dir", type=Path, default=Path("runs"), help="folder of the checkpoints to come (default: runs)")
    add("--limit-s", type=number(5.0, 86400.0), default=120.0, help="seconds to its end (default: 120)")
    add("--ranks", type=whole_number(), default=0, help="ranks to start alone (default: one per GPU, or two)")
    about = "read NCCL's transport from the log of a run with NCCL_DEBUG=INFO, and check nothing else"
    add("--nccl-log", type=Path, metavar="FILE", help=about)
    # the file in which rank 0 leaves the exit code for the process that started it
    add("--verdict-to", type=Path, help=argparse.SUPPRESS)
    options = parser.parse(argv)
    if options.nccl_log:
        summary, verdicts = checks.transport_of(options.nccl_log)
        lines = [f"odd  {what}.\n     HINT: {hint}" if hint else f"ok   {what}." for what, hint in verdicts]
        return print_answer("\n".join([summary, *lines]), "fsdp.doctor")
    env = from_environment()
    if env.launcher == "a single process" and options.ranks != 1:
        return _start_ranks(options, env.device.type == "cuda")
    return as_rank(env, options.dir.absolute(), options.limit_s, options.verdict_to)


def _start_ranks(options: argparse.Namespace, on_cuda: bool) -> int:
    """Start ranks on this node alone. They exit with 0: torchrun would report any other code as a crash. The
    verdict comes in a file.
    """
    ranks = options.ranks or (torch.cuda.device_count() if on_cuda else 2)
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        verdict = Path(folder, "code")
        starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        flags = ["--dir", str(options.dir), "--limit-s", str(options.limit_s), "--verdict-to", str(verdict)]
        done = subprocess.run(
            [*starter, "-m", "fsdp.doctor", *flags], env={"OMP_NUM_THREADS": "1", **os.environ}, check=False
        )
        return int(verdict.read_text()) if verdict.exists() else done.returncode or NOT_FIT


# ---------------------------------------------------------------- one rank


Nodes = list[list[int]]
"""The ranks of each node, in order."""


@dataclass
class RankExam:
    """One rank, its store, and its measurements so far."""

    env: DistEnv
    store: dist.Store
    folder: Path
    ends: float
    report: dict[str, Any] = field(default_factory=dict)
    nodes: Nodes = field(default_factory=list)
    """Set once all ranks have met."""

    def stage(self, name: str) -> None:
        self.store.set(f"stage/{self.env.rank}", name)

    def publish(self, **values: Any) -> None:
        self.report |= values
        self.store.set(f"report/{self.env.rank}", json.dumps(self.report))

    @property
    def left(self) -> timedelta:
        return timedelta(seconds=max(0.1, self.ends - time.monotonic()))

    @property
    def heads(self) -> list[int]:
        """The first rank of each node, which measures what the node's ranks share."""
        return [ranks[0] for ranks in self.nodes]

    def gather(self, key: str, value: Any, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """Each rank's value under this key, or that of `ranks`; waits for them."""
        self.store.set(f"{key}/{self.env.rank}", json.dumps(value))
        keys = {rank: f"{key}/{rank}" for rank in ranks or range(self.env.world_size)}
        self.store.wait(list(keys.values()), self.left)
        return {rank: json.loads(self.store.get(key)) for rank, key in keys.items()}

    def gather_reports(self, name: str) -> dict[int, dict[str, Any]]:
        """Every rank's report after a stage."""
        self.stage(f"waiting for the others after {name}")
        return self.gather(name, self.report)


def examine(exam: RankExam) -> None:
    """Run all stages. Raises the error of a store or collective when time is up."""
    env = exam.env
    exam.stage("the first calls of its device")
    facts = facts_of(env)
    exam.stage("meeting the others")
    exam.publish(facts=facts.as_json())
    exam.nodes = nodes_of(exam.gather("node", env.node_rank))
    if env.rank in exam.heads and len(exam.nodes) > 1:
        _check_network(exam, facts.host)
    for turn in range(1 + REPEATS):  # all ranks at once, as in training; again if one seems slow
        exam.gather_reports(f"before-product-{turn}")
        exam.stage("a matrix product")
        values = checks.check_device(env.device, facts)
        exam.publish(**values | {"tflops": max(values["tflops"], exam.report.get("tflops", 0.0))})
        if not faults(PRODUCT, exam.gather_reports(f"product-{turn}")):
            break
    if can_form_group(exam.gather_reports("device")) and env.world_size > 1:
        exam.stage("forming a process group")
        with process_group(env, exam.left.total_seconds(), dist.PrefixStore("group", exam.store)):
            exam.publish(**checks.check_links(env, exam.nodes, exam.stage))
            exam.gather_reports("links")
    if env.rank in exam.heads:
        exam.stage("storage")
        _check_storage(exam)
    exam.stage("done")
    exam.publish(done=True)
    exam.gather("over", True)  # rank 0 reports all ranks


def nodes_of(node_of_rank: Mapping[int, int]) -> Nodes:
    count = max(node_of_rank.values()) + 1
    return [[rank for rank, of in sorted(node_of_rank.items()) if of == node] for node in range(count)]


def _check_network(exam: RankExam, host: str) -> None:
    exam.stage("names and ports")
    named = resolves(host) or os.environ.get("GLOO_SOCKET_IFNAME")
    exam.publish(unnamed="" if named else f"its own name {host} does not resolve")
    with listen(0, 256) as server:  # the kernel accepts connections up to the backlog
        address = [address_towards(rendezvous_host()) or resolves(host), server.getsockname()[1]]
        addresses = list(exam.gather("address", address, exam.heads).values())
        exam.publish(unreachable=checks.unreachable(exam.env.node_rank, addresses))
        exam.stage("waiting for the others' connections")
        exam.gather("reached", True, exam.heads)


def _check_storage(exam: RankExam) -> None:
    """Writes a file, and looks for the first node's, as a run writes it."""
    size = (256 << 20) if exam.env.device.type == "cuda" else (16 << 20)
    file = exam.folder / "doctor" / f"probe-{exam.env.node_rank}-{secrets.token_hex(4)}"
    try:
        exam.publish(**checks.write_probe(file, size))
        first = exam.gather("wrote", file.name, exam.heads)[0]
        if not appears(file.with_name(first)):
            exam.publish(unseen=f"does not see what the first node wrote into {exam.folder}")
        exam.gather("read", True, exam.heads)
    finally:
        with contextlib.suppress(OSError):  # storage that fails is in the report already
            file.unlink(missing_ok=True)


# ---------------------------------------------------------------- the whole examination, the verdict


def as_rank(env: DistEnv, run: Path, limit_s: float, verdict_to: Path | None) -> int:
    """Rank 0 returns the verdict as an exit code; with `verdict_to` 0, and the code is in that file. Stages
    run in a thread: when time is up the process ends in the midst of any.
    """
    began, code = time.monotonic(), 0
    store = dist.PrefixStore("doctor", rendezvous_store(env, limit_s))
    exam = RankExam(env, store, run, began + limit_s)
    worker = threading.Thread(target=_guarded, args=(exam,), name="doctor", daemon=True)
    worker.start()
    # Rank 0 first: it reads the reports from its store, which ranks that exit would disturb.
    worker.join(limit_s if env.is_main else limit_s + END_S)
    if env.is_main:
        if env.world_size > 1:  # a connection of its own: the thread may wait in the other
            store = dist.PrefixStore("doctor", rendezvous_store(env, 10.0, serves=False))
        reports = reports_so_far(env, store)
        code = _report(reports, env.launcher, run, time.monotonic() - began, verdict_to)
        with contextlib.suppress(dist.DistError):  # the store lasts until ranks that are done have left it
            store.wait([f"bye/{rank}" for rank in range(1, env.world_size)], timedelta(seconds=END_S))
    if worker.is_alive():
        sys.stdout.flush()
        os._exit(code)
    return code


def _guarded(exam: RankExam) -> None:
    set_thread_device(exam.env.device)
    try:
        examine(exam)
        exam.store.set(f"bye/{exam.env.rank}", "")
    except (RuntimeError, OSError, dist.DistError) as error:
        # A stage that fails on one rank fails on others too: rank 0 reports what each has published.
        try:
            exam.publish(failure=first_line(error))
            exam.store.set(f"over/{exam.env.rank}", "true")
        except (RuntimeError, dist.DistError):  # rank 0 and its store are gone
            print_line(f"fsdp.doctor: rank {exam.env.rank}: {first_line(error)}")


def reports_so_far(env: DistEnv, store: dist.Store) -> NodeReports:
    """All reports so far, without waiting."""
    keys = {rank: f"report/{rank}" for rank in range(env.world_size)}
    by_rank = {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
    facts = {rank: report["facts"] for rank, report in by_rank.items() if "facts" in report}
    # A missing rank is counted on the node that it has if all nodes have as many ranks as this one.
    each, last = max(1, env.local_world_size), env.num_nodes - 1
    nodes = nodes_of(
        {rank: min(rank // each, last) for rank in keys}
        | {rank: known["node"] for rank, known in facts.items()}
    )
    names = {known["node"]: known["host"] for known in facts.values()}
    hosts = [names.get(node, f"node {node}") for node in range(len(nodes))]
    unfinished = [rank for rank, report in by_rank.items() if not report.get("done")]
    stages = {rank: store.get(f"stage/{rank}").decode() for rank in unfinished}
    return NodeReports(by_rank, nodes, hosts, stages)


def _report(reports: NodeReports, launcher: str, run: Path, seconds: float, verdict_to: Path | None) -> int:
    verdict = judge(reports, launcher)
    table, code = text(reports, verdict, seconds), 0 if verdict.fit else NOT_FIT
    print_line(table, sys.stdout)
    record = {**asdict(verdict), "ranks": reports.by_rank}
    files = {
        **({verdict_to: str(code)} if verdict_to else {}),
        run / "doctor" / "doctor.txt": table,
        run / "doctor" / "doctor.json": json.dumps(record, indent=1),
        run / "doctor" / "exclude": ",".join(verdict.exclude),
    }
    try:
        for file, content in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, content + "\n" * bool(content))
    except OSError as error:
        print_line(f"fsdp.doctor: {run} cannot be written ({error.strerror}): the table has the result")
    return 0 if verdict_to else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
