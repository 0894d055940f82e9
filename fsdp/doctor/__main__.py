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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp.base.devices import set_thread_device
from fsdp.base.errors import ConfigError, LaunchError, first_line
from fsdp.base.text import print_line
from fsdp.config.command_line import CommandParser, number, prints_errors, whole_number
from fsdp.dist.env import DistEnv, from_environment, gloo_interface_is_set, rendezvous_host
from fsdp.dist.network import address_towards, listen, resolves
from fsdp.dist.preflight import appears, facts_of
from fsdp.dist.process_group import process_group, rendezvous_store
from fsdp.doctor import measure
from fsdp.doctor.findings import PRODUCT, NodeReports, can_form_group, judge, slow, text
from fsdp.rundir.paths import write_atomically

NOT_FIT = LaunchError.exit_code
REPEATS = 2
"""A rank that seems slow may have been disturbed: all ranks measure again this often, and the best counts."""
END_S = 5.0


@prints_errors("fsdp.doctor")
def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fsdp.doctor", __doc__)
    for name, kind, default, about in (
        ("dir", Path, Path("runs"), "folder of the checkpoints to come (default: runs)"),
        ("limit-s", number(5.0, 86400.0), 120.0, "seconds after which it ends, done or not (default: 120)"),
        ("ranks", whole_number(), 0, "in a single process: ranks to start (default: a rank per GPU, or two)"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=about)
    about = "read NCCL's transport from a log of NCCL_DEBUG=INFO, and check nothing else; may be repeated"
    parser.add_argument("--nccl-log", type=Path, action="append", metavar="FILE", help=about)
    # the file in which rank 0 leaves the exit code for the process that started it
    parser.add_argument("--verdict-to", type=Path, help=argparse.SUPPRESS)
    options = parser.parse(argv)
    if options.nccl_log:
        return _print_transport(options.nccl_log)
    env = from_environment()
    if env.launcher == "a single process" and options.ranks != 1:
        return _start_ranks(options, env.device.type == "cuda")
    return as_rank(env, options.dir.absolute(), options.limit_s, options.verdict_to)


def _print_transport(files: Sequence[Path]) -> int:
    transport = measure.transport_of(files)
    if not transport["verdicts"]:
        names = ", ".join(map(str, files))
        hint = "start the run with NCCL_DEBUG=INFO, and give the file of its output"
        raise ConfigError(f"{names} has no line of NCCL.", hint)
    print(transport["summary"])
    for what, hint in transport["verdicts"]:
        print(f"odd  {what}.\n     HINT: {hint}" if hint else f"ok   {what}.")
    return 0


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


@dataclass
class RankExam:
    """One rank, its store, and its measurements so far."""

    env: DistEnv
    store: dist.Store
    folder: Path
    ends: float
    report: dict[str, Any] = field(default_factory=dict)
    nodes: list[list[int]] = field(default_factory=list)
    """The ranks of each node, once all ranks have met."""

    def stage(self, name: str) -> None:
        self.store.set(f"stage/{self.env.rank}", name)

    def publish(self, **values: Any) -> None:
        self.report |= values
        self.store.set(f"report/{self.env.rank}", json.dumps(self.report))

    @property
    def left_s(self) -> float:
        return max(0.1, self.ends - time.monotonic())

    @property
    def heads(self) -> list[int]:
        """The first rank of each node, which measures what the node's ranks share."""
        return [ranks[0] for ranks in self.nodes]

    def gather(self, key: str, value: Any, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """Each rank's value under this key, or that of `ranks`; waits for them."""
        self.store.set(f"{key}/{self.env.rank}", json.dumps(value))
        keys = {rank: f"{key}/{rank}" for rank in ranks or range(self.env.world_size)}
        self.store.wait(list(keys.values()), timedelta(seconds=self.left_s))
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
    exam.publish(facts=facts.as_json(), device=env.device.type, folder=str(exam.folder))
    exam.nodes = nodes_of(exam.gather("here", {"node": env.node_rank, "host": facts.host}))
    if env.rank in exam.heads and len(exam.nodes) > 1:
        _check_network(exam, facts.host)
    for turn in range(1 + REPEATS):  # all ranks at once, as in training; again if one seems slow
        exam.gather_reports(f"before-product-{turn}")
        exam.stage("a matrix product")
        values = measure.check_device(env.device, facts.device)
        exam.publish(**values | {"tflops": max(values["tflops"], exam.report.get("tflops", 0.0))})
        if not slow(PRODUCT, exam.gather_reports(f"product-{turn}")):
            break
    if can_form_group(exam.gather_reports("device")) and env.world_size > 1:
        _check_links(exam)
    if env.rank in exam.heads:
        exam.stage("storage")
        _check_storage(exam)
    exam.stage("done")
    exam.publish(done=True)
    exam.gather("over", True)  # rank 0 reports all ranks


def nodes_of(here: dict[int, Any]) -> list[list[int]]:
    """The ranks of each node, in order."""
    count = max(place["node"] for place in here.values()) + 1
    return [[rank for rank in sorted(here) if here[rank]["node"] == node] for node in range(count)]


def _check_network(exam: RankExam, host: str) -> None:
    exam.stage("names and ports")
    named = resolves(host) or gloo_interface_is_set()
    exam.publish(unnamed="" if named else f"its own name {host} does not resolve")
    with listen(0, 256) as server:  # the kernel accepts connections up to the backlog
        address = [address_towards(rendezvous_host()) or resolves(host), server.getsockname()[1]]
        addresses = list(exam.gather("address", address, exam.heads).values())
        exam.publish(unreachable=measure.unreachable(exam.env.node_rank, addresses))
        exam.stage("waiting for the others' connections")
        exam.gather("reached", True, exam.heads)


def _check_links(exam: RankExam) -> None:
    exam.stage("forming a process group")
    with (
        measure.recorded_transport(exam.env.device.type == "cuda") as log,
        process_group(exam.env, exam.left_s, dist.PrefixStore("group", exam.store)),
    ):
        exam.publish(**measure.check_links(exam.env, exam.nodes, exam.stage))
        if log is not None:
            exam.publish(transport=measure.transport_of(sorted(log.glob("*.log"))))
        exam.gather_reports("links")


def _check_storage(exam: RankExam) -> None:
    """Writes a file, looks for the first node's, as a run writes it, and reads the neighbour's."""
    size = (256 << 20) if exam.env.device.type == "cuda" else (16 << 20)
    file = exam.folder / "doctor" / f"probe-{exam.env.node_rank}-{secrets.token_hex(4)}"
    try:
        exam.publish(**measure.write_probe(file, size))
        names = list(exam.gather("wrote", file.name, exam.heads).values())
        if exam.env.node_rank > 0 and not appears(file.with_name(names[0])):
            exam.publish(unseen=f"does not see what the first node wrote into {exam.folder}")
        neighbour = file.with_name(names[(exam.env.node_rank + 1) % len(names)])
        if appears(neighbour):
            exam.publish(**measure.read_probe(neighbour))
        exam.gather("read", True, exam.heads)
    finally:
        with contextlib.suppress(OSError):  # storage that fails is in the report already
            file.unlink(missing_ok=True)


# ---------------------------------------------------------------- the whole examination, the verdict


def as_rank(env: DistEnv, run: Path, limit_s: float, verdict_to: Path | None) -> int:
    """Returns the verdict as an exit code; with `verdict_to` 0, and the code is written into that file, if it
    can be. The stages run in a thread: when time is up the process ends in the midst of any.
    """
    began = time.monotonic()
    store = dist.PrefixStore("doctor", rendezvous_store(env, limit_s))
    worker = threading.Thread(
        target=_guarded, args=(RankExam(env, store, run, began + limit_s),), name="doctor", daemon=True
    )
    worker.start()
    # Rank 0 first: it reads the reports from its store, which ranks that exit would disturb.
    worker.join(limit_s if env.is_main else limit_s + END_S)
    code = NOT_FIT if verdict_to is None else 0
    with contextlib.suppress(RuntimeError, dist.DistError, LaunchError):  # rank 0 and its store are gone
        if env.world_size > 1:  # a connection of its own: the thread may wait in the other
            store = dist.PrefixStore("doctor", rendezvous_store(env, 10.0, serves=False))
        if env.is_main:
            code = _report(
                reports_so_far(env, store), env.launcher, run, time.monotonic() - began, verdict_to
            )
            store.set("verdict", str(code))
            # until the others have read it; ranks that have failed before do not
            store.wait([f"bye/{rank}" for rank in range(1, env.world_size)], timedelta(seconds=END_S))
        else:
            store.wait(["verdict"], timedelta(seconds=limit_s + END_S))
            code = int(store.get("verdict"))
            store.set(f"bye/{env.rank}", "")
    if worker.is_alive():
        sys.stdout.flush()
        os._exit(code)
    return code


def _guarded(exam: RankExam) -> None:
    set_thread_device(exam.env.device)
    try:
        examine(exam)
    except (RuntimeError, OSError, dist.DistError) as error:
        # A stage that fails on one rank fails on others too: rank 0 reports what each has published.
        try:
            exam.publish(failure=first_line(error))
            exam.store.set(f"over/{exam.env.rank}", "true")
        except (RuntimeError, dist.DistError):  # rank 0 and its store are gone
            print_line(f"fsdp.doctor: rank {exam.env.rank}: {first_line(error)}")


def reports_so_far(env: DistEnv, store: dist.Store) -> NodeReports:
    """All reports so far, without waiting."""

    def known(key: str) -> dict[int, Any]:
        ranks = [rank for rank in range(env.world_size) if store.check([f"{key}/{rank}"])]
        return {rank: json.loads(store.get(f"{key}/{rank}")) for rank in ranks}

    by_rank = known("report")
    # A missing rank is counted on the node that it has if all nodes have as many ranks as this one.
    here = {
        rank: {"node": min(rank // max(1, env.local_world_size), env.num_nodes - 1), "host": ""}
        for rank in range(env.world_size)
    } | known("here")
    nodes = nodes_of(here)
    hosts = [
        next((here[rank]["host"] for rank in ranks if here[rank]["host"]), f"node {node}")
        for node, ranks in enumerate(nodes)
    ]
    unfinished = [rank for rank, report in by_rank.items() if not report.get("done")]
    return NodeReports(
        by_rank, nodes, hosts, {rank: store.get(f"stage/{rank}").decode() for rank in unfinished}
    )


def _report(
    reports: NodeReports, launcher: str, run: Path, seconds: float, verdict_to: Path | None = None
) -> int:
    verdict = judge(reports, launcher)
    table, code = text(reports, verdict, seconds), 0 if verdict.fit else NOT_FIT
    print_line(table, sys.stdout)
    findings = [asdict(finding) for finding in verdict.findings]
    record = {"verdict": str(verdict), "fit": verdict.fit, "findings": findings, "ranks": reports.by_rank}
    files = {
        run / "doctor" / "doctor.txt": f"{table}\n",
        run / "doctor" / "doctor.json": json.dumps(record, indent=1) + "\n",
        run / "doctor" / "exclude": ",".join(verdict.exclude) + "\n" * bool(verdict.exclude),
    } | ({verdict_to: str(code)} if verdict_to else {})
    for file, content in files.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, content)
        except OSError as error:
            print_line(f"fsdp.doctor: {file} cannot be written ({error.strerror}): the table has the result")
    return 0 if verdict_to and verdict_to.exists() else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
