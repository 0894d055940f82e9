"""One rank of the doctor: its checks in order within the time limit; rank 0 judges, prints and writes files.

A rank publishes each measurement in the rendezvous store at once, so that rank 0 can report it even if a
later stage hangs. A process group is only formed if every connection was possible.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp.base.errors import LaunchError, first_line
from fsdp.base.streams import print_line
from fsdp.dist.env import DistEnv, from_environment, gloo_interface_is_set, rendezvous_host
from fsdp.dist.preflight import facts_of
from fsdp.dist.process_group import process_group, rendezvous_store
from fsdp.doctor import measure, table
from fsdp.doctor.findings import NodeReports, can_form_group, judge, slow_ranks
from fsdp.rundir.paths import write_atomically

NOT_FIT = LaunchError.exit_code
REPEATS = 2
"""A rank that seems slow may have been disturbed: all ranks measure again this often, and the best counts."""
END_S = 5.0


@dataclass
class RankExam:
    """One rank, its store, and its measurements so far."""

    env: DistEnv
    store: dist.Store
    folder: Path
    ends: float
    report: dict[str, Any] = field(default_factory=dict)

    def stage(self, name: str) -> None:
        self.store.set(f"stage/{self.env.rank}", name)

    def publish(self, **seen: Any) -> None:
        self.report |= seen
        self.store.set(f"report/{self.env.rank}", json.dumps(self.report))

    @property
    def left_s(self) -> float:
        return max(0.1, self.ends - time.monotonic())

    def gather(self, key: str, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """Each rank's value under this key, or that of `ranks`; waits for them."""
        expected = range(self.env.world_size) if ranks is None else ranks
        self.store.wait([f"{key}/{rank}" for rank in expected], timedelta(seconds=self.left_s))
        return {rank: json.loads(self.store.get(f"{key}/{rank}")) for rank in expected}

    def gather_reports(self, name: str) -> dict[int, dict[str, Any]]:
        """Every rank's report after a stage."""
        self.stage(f"waiting for the others after {name}")
        self.store.set(f"{name}/{self.env.rank}", json.dumps(self.report))
        return self.gather(name)


def examine(exam: RankExam) -> None:
    """Run all stages. Raises the error of a store or collective when time is up."""
    env = exam.env
    exam.stage("the first calls of its device")
    facts = facts_of(env)
    exam.stage("meeting the others")
    place = {"node": env.node_rank, "local_rank": env.local_rank, "host": facts.host}
    exam.store.set(f"here/{env.rank}", json.dumps(place))
    exam.publish(facts=facts.as_json())
    exam.gather("here")
    _check_network(exam)
    _check_device(exam)
    by_rank = exam.gather_reports("device")
    if can_form_group(by_rank) and env.world_size > 1:
        _check_links(exam)
    _check_storage(exam)
    exam.stage("done")
    exam.publish(done=True)
    # Rank 0 reports all ranks, and waits until each has published that it is done.
    mark_finished(exam)
    exam.gather("over")


def mark_finished(exam: RankExam) -> None:
    """This rank publishes nothing more."""
    exam.store.set(f"over/{exam.env.rank}", "true")


def nodes_of(here: dict[int, Any]) -> list[list[int]]:
    """The ranks of each node, in order."""
    count = max(one["node"] for one in here.values()) + 1
    return [[rank for rank in sorted(here) if here[rank]["node"] == node] for node in range(count)]


def reports_so_far(exam: RankExam, store: dist.Store) -> NodeReports:
    """All reports so far, without waiting. `store` is one of its own: the main thread may wait in another."""
    env = exam.env
    here = _known(store, "here", env.world_size)
    by_rank = _known(store, "report", env.world_size)
    # A missing rank is counted on the node that it has if all nodes have as many ranks as this one.
    per_node = max(1, env.local_world_size)
    for rank in range(env.world_size):
        here.setdefault(
            rank,
            {"node": min(rank // per_node, env.num_nodes - 1), "local_rank": rank % per_node, "host": ""},
        )
    nodes = nodes_of(here)
    hosts = [
        next((here[r]["host"] for r in ranks if here[r]["host"]), f"node {n}")
        for n, ranks in enumerate(nodes)
    ]
    stages = {
        rank: store.get(f"stage/{rank}").decode()
        for rank, report in by_rank.items()
        if not report.get("done")
    }
    return NodeReports(by_rank, nodes, hosts, stages)


def _known(store: dist.Store, key: str, ranks: int) -> dict[int, Any]:
    return {
        rank: json.loads(store.get(f"{key}/{rank}"))
        for rank in range(ranks)
        if store.check([f"{key}/{rank}"])
    }


# ---------------------------------------------------------------- stages


def _heads(exam: RankExam) -> list[int]:
    return [ranks[0] for ranks in nodes_of(exam.gather("here")) if ranks]


def _check_network(exam: RankExam) -> None:
    exam.stage("names and ports")
    env, heads = exam.env, _heads(exam)
    if env.rank not in heads or len(heads) == 1:
        return
    seen = measure.check_names(exam.report["facts"]["host"], rendezvous_host()) | {
        "interface": gloo_interface_is_set()
    }
    with measure.listener() as port:
        exam.store.set(f"place/{env.rank}", json.dumps([seen["address"], port]))
        places = exam.gather("place", heads)
        found = measure.reach(env.node_rank, {node: tuple(places[rank]) for node, rank in enumerate(heads)})
        exam.publish(network=seen, ports=found)
        exam.store.set(f"reached/{env.rank}", "true")
        exam.stage("waiting for the others' connections")
        exam.gather("reached", heads)  # the port stays open until all have tried it


def _check_device(exam: RankExam) -> None:
    """All ranks at once, as in training; again if one seems slow."""
    env = exam.env
    for turn in range(1 + REPEATS):
        exam.gather_reports(f"before-product-{turn}")
        exam.stage("a matrix product")
        seen = measure.check_device(env.device, exam.report["facts"]["device"])
        before = exam.report.get("device", {}).get("tflops", 0.0)
        exam.publish(device=seen | {"tflops": max(seen["tflops"], before)})
        if not slow_ranks(exam.gather_reports(f"product-{turn}")):
            return


def _check_links(exam: RankExam) -> None:
    exam.stage("forming a process group")
    nodes = nodes_of(exam.gather("here"))
    on_cuda = exam.env.device.type == "cuda"
    with (
        measure.recorded_transport(on_cuda) as log,
        process_group(exam.env, exam.left_s, dist.PrefixStore("group", exam.store)),
    ):
        exam.publish(links=measure.check_links(exam.env, nodes, exam.stage))
        if log is not None:
            exam.publish(transport=measure.read_transport(log, len(nodes)))
        exam.gather_reports("links")


def _check_storage(exam: RankExam) -> None:
    """One rank per node writes a file, by_rank for all files, reads its neighbour's, and removes its own."""
    exam.stage("storage")
    env, heads = exam.env, _heads(exam)
    if env.rank not in heads:
        return
    folder = exam.folder / "doctor"
    name = f"probe-{env.node_rank}-{secrets.token_hex(4)}"
    seen: dict[str, Any] = {"folder": str(exam.folder)}
    try:
        seen |= measure.write_probe(folder, name, (256 << 20) if env.device.type == "cuda" else (16 << 20))
        exam.store.set(f"wrote/{env.rank}", json.dumps(name))
        names = dict(enumerate(exam.gather("wrote", heads).values()))
        seen["unseen"] = measure.unseen(folder, names)
        neighbour = (env.node_rank + 1) % len(heads)
        if neighbour not in seen["unseen"]:
            seen |= measure.read_probe(folder / names[neighbour])
        exam.publish(storage=seen)
        exam.store.set(f"read/{env.rank}", "true")
        exam.gather("read", heads)
    finally:
        with contextlib.suppress(OSError):  # storage that fails is in the report already
            (folder / name).unlink(missing_ok=True)


# ---------------------------------------------------------------- time limit


@contextlib.contextmanager
def time_limit(
    exam: RankExam, limit_s: float, report: Callable[[NodeReports], int], late: int
) -> Iterator[None]:
    """When time is up this process exits from anywhere, with the code `late`.

    Rank 0 reports the results so far first, and exits with the code that `report` returns.
    """

    def end() -> None:
        code = late
        try:
            if exam.env.is_main:
                store = rendezvous_store(exam.env, 10.0, serves=False)
                code = report(reports_so_far(exam, dist.PrefixStore("doctor", store)))
        finally:
            sys.stdout.flush()
            os._exit(code)

    # Rank 0 first: it reads the reports from its store, which ranks that exit would disturb.
    timer = threading.Timer(limit_s if exam.env.is_main else limit_s + END_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# ---------------------------------------------------------------- the whole examination, the verdict


def as_rank(run: Path, limit_s: float, verdict_to: Path | None) -> int:
    """Returns the verdict as an exit code; with `verdict_to` 0, and the code is written into that file, if it
    can be.
    """
    env, began = from_environment(), time.monotonic()
    reporting, codes = threading.Lock(), list[int]()

    def report(reports: NodeReports) -> int:
        """Only once: the time limit may come while the verdict is being reported."""
        with reporting:
            if not codes:
                verdict = _report(reports, env.launcher, run, time.monotonic() - began)
                codes.append(verdict if verdict_to is None else _left_in(verdict_to, verdict))
        return codes[0]

    store = dist.PrefixStore("doctor", rendezvous_store(env, limit_s))
    exam = RankExam(env, store, run, began + limit_s)
    incomplete = NOT_FIT if verdict_to is None else 0
    with time_limit(exam, limit_s, report, incomplete):
        try:
            examine(exam)
        except (RuntimeError, dist.DistError) as error:
            # A stage that fails on one rank fails on others too: rank 0 reports what each has published.
            failed = first_line(error)
            if not env.is_main:
                return _publish_failure(exam, failed, incomplete)
            exam.publish(failure=failed)
        if env.is_main:
            code = report(reports_so_far(exam, store))
            store.set("verdict", str(code))
            _wait_for_the_others(store, env.world_size)
            return code
        code = int(store.get("verdict"))
        store.set(f"bye/{env.rank}", "")
        return code


def _publish_failure(exam: RankExam, failed: str, code: int) -> int:
    try:
        exam.publish(failure=failed)
        mark_finished(exam)
    except (RuntimeError, dist.DistError):
        # rank 0 and its store are gone
        print_line(f"fsdp.doctor: rank {exam.env.rank}: {failed}")
    return code


def _wait_for_the_others(store: dist.Store, ranks: int) -> None:
    """Until they have read the verdict; ranks that have failed before do not."""
    try:
        store.wait([f"bye/{rank}" for rank in range(1, ranks)], timedelta(seconds=END_S))
    except (RuntimeError, dist.DistError):
        return


def _left_in(file: Path, verdict: int) -> int:
    """The exit code of a rank that leaves its verdict in a file: the verdict if that cannot be written."""
    try:
        file.write_text(str(verdict))
    except OSError as error:
        why = f"{file} cannot be written ({error.strerror})"
        print_line(f"fsdp.doctor: {why}: the verdict is this command's exit code, {verdict}")
        return verdict
    return 0


def _report(reports: NodeReports, launcher: str, run: Path, seconds: float) -> int:
    verdict = judge(reports, launcher)
    shown = table.text(reports, verdict, seconds)
    print_line(shown, sys.stdout)
    folder = run / "doctor"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "doctor.txt", f"{shown}\n")
        record = {
            "verdict": str(verdict),
            "fit": verdict.fit,
            "findings": [asdict(one) for one in verdict.findings],
        }
        write_atomically(
            folder / "doctor.json", json.dumps(record | {"looks": reports.by_rank}, indent=1) + "\n"
        )
        write_atomically(folder / "exclude", ",".join(verdict.exclude) + "\n" if verdict.exclude else "")
    except OSError as error:
        why = f"{folder} cannot be written ({error.strerror})"
        print_line(f"fsdp.doctor: {why}: the result is in the table above alone")
    return 0 if verdict.fit else NOT_FIT
