"""One rank of the doctor: runs the stages within the time limit; rank 0 judges, prints and writes files."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from fsdp.base.errors import LaunchError, first_line
from fsdp.base.streams import print_line
from fsdp.dist.env import from_environment
from fsdp.dist.process_group import rendezvous_store
from fsdp.doctor import stages, table
from fsdp.doctor.findings import NodeReports, judge
from fsdp.rundir.atomic_write import write_atomically

NOT_FIT = LaunchError.exit_code


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
    exam = stages.RankExam(env, store, run, began + limit_s)
    incomplete = NOT_FIT if verdict_to is None else 0
    with stages.time_limit(exam, limit_s, report, incomplete):
        try:
            stages.examine(exam)
        except (RuntimeError, dist.DistError) as error:
            # A stage that fails on one rank fails on others too: rank 0 reports what each has published.
            failed = first_line(error)
            if not env.is_main:
                return _publish_failure(exam, failed, incomplete)
            exam.publish(failure=failed)
        if env.is_main:
            code = report(stages.reports_so_far(exam, store))
            store.set("verdict", str(code))
            _wait_for_the_others(store, env.world_size)
            return code
        code = int(store.get("verdict"))
        store.set(f"bye/{env.rank}", "")
        return code


def _publish_failure(exam: stages.RankExam, failed: str, code: int) -> int:
    try:
        exam.publish(failure=failed)
        stages.mark_finished(exam)
    except (RuntimeError, dist.DistError):
        # rank 0 and its store are gone
        print_line(f"fsdp.doctor: rank {exam.env.rank}: {failed}")
    return code


def _wait_for_the_others(store: dist.Store, ranks: int) -> None:
    """Until they have read the verdict; ranks that have failed before do not."""
    try:
        store.wait([f"bye/{rank}" for rank in range(1, ranks)], timedelta(seconds=stages.END_S))
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
