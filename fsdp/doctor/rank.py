"""One rank of the doctor's: all stages in their own time, then rank 0 judges, tells, and leaves files."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from fsdp.base.errors import LaunchError
from fsdp.dist.env import from_environment
from fsdp.dist.process_group import meeting_store
from fsdp.doctor import stages, table
from fsdp.doctor.findings import NodeReports, judge
from fsdp.rundir.atomic_write import write_atomically

NOT_FIT = LaunchError.exit_code


def as_rank(run: Path, limit_s: float, verdict_to: Path | None) -> int:
    """The verdict as an exit code; or 0 always and the code in a file, so that no launcher calls a verdict a
    crash.
    """
    env, began = from_environment(), time.monotonic()
    telling, told = threading.Lock(), list[int]()

    def tell(scene: NodeReports) -> int:
        """Once: the end of its time may come while the verdict is told."""
        with telling:
            if not told:
                told.append(_tell(scene, run, time.monotonic() - began))
                if verdict_to is not None:
                    verdict_to.write_text(str(told[0]))
        return told[0] if verdict_to is None else 0

    store = dist.PrefixStore("doctor", meeting_store(env, limit_s))
    visit = stages.Visit(env, store, run, began + limit_s)
    otherwise = NOT_FIT if verdict_to is None else 0
    with stages.bounded(visit, limit_s, tell, otherwise):
        try:
            stages.examine(visit)
        except (RuntimeError, dist.DistError) as error:
            # A stage that failed for one fails for others too: what each saw is told, and rank 0 tells of
            # all.
            failed = str(error).splitlines()[0][:200]
            if not env.is_main:
                return _leave_word(visit, failed, otherwise)
            visit.tell(failure=failed)
        if env.is_main:
            code = tell(stages.scene_of(visit, store))
            store.set("verdict", str(code))
            _wait_for_the_others(store, env.world_size)
            return code
        code = int(store.get("verdict"))
        store.set(f"bye/{env.rank}", "")
        return code


def _leave_word(visit: stages.Visit, failed: str, code: int) -> int:
    try:
        visit.tell(failure=failed)
        stages.over(visit)
    except (RuntimeError, dist.DistError):
        # rank 0 and its store are gone
        print(f"fsdp.doctor: rank {visit.env.rank}: {failed}", file=sys.stderr)
    return code


def _wait_for_the_others(store: dist.Store, ranks: int) -> None:
    """Until they have read the verdict; those that failed before have left already, and never come."""
    try:
        store.wait([f"bye/{rank}" for rank in range(1, ranks)], timedelta(seconds=stages.LEAVE_S))
    except (RuntimeError, dist.DistError):
        return


def _tell(scene: NodeReports, run: Path, seconds: float) -> int:
    verdict = judge(scene)
    print(table.text(scene, verdict, seconds), flush=True)
    folder = run / "doctor"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "doctor.html", table.page(scene, verdict, seconds))
        record = {
            "verdict": str(verdict),
            "fit": verdict.fit,
            "findings": [asdict(one) for one in verdict.findings],
        }
        write_atomically(folder / "doctor.json", json.dumps(record | {"looks": scene.looks}, indent=1) + "\n")
        write_atomically(folder / "exclude", ",".join(verdict.exclude) + "\n" if verdict.exclude else "")
    except OSError as error:
        print(
            f"fsdp.doctor: {folder} cannot be written ({error.strerror}): the table above is all there is",
            file=sys.stderr,
        )
    return 0 if verdict.fit else NOT_FIT
