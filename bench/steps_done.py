"""A start, its records and a report against the steps that a run has recorded, for bench/scale.py.

One real run of STEPS steps, whose metrics.jsonl is filled to each number of records. They repeat the steps up
to the last one, so that the run's own checkpoint is the one to resume.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import tables
from bench.peers import setup

STEPS, REPEATED = 10, 100
FLAGS = "--model.name mlp --model.args.hidden 8 --data.name digits --run.log_every_steps 100"
LINE = (
    b'{"step": %d, "loss": 2.302585092994046, "grad_norm": 1.2345678901234567, "lr": 0.0003, "samples": %d, '
    b'"tokens": 0, "step_time_s": 0.12345678901234568, "data_wait_s": 0.00012345678901234567, '
    b'"per_s": 518.4000047174401, "max_mem_gib": 0.2987654321}\n'
)
RECORDS_ALONE = """
import sys, pathlib
from fsdp.rundir import history, paths
run = paths.RunDir(pathlib.Path(sys.argv[1]))
history.truncate_metrics(run, int(sys.argv[2])), history.last_step(run), history.count_starts(run)
"""


FROM_A_SMALL_PROCESS = """
import json, resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({"cpu_s": usage.ru_utime + usage.ru_stime, "peak_mib": usage.ru_maxrss / 1024}))
sys.exit(code)
"""


@dataclass(frozen=True)
class Used:
    """Processor seconds and peak MiB of a process."""

    cpu_s: float
    peak_mib: float


def used(*words: str) -> Used:
    """Started from a small process: Linux counts the memory of the process that forks in its child's peak."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(setup.ROOT)}
    command = [sys.executable, "-c", FROM_A_SMALL_PROCESS, sys.executable, *words]
    found = subprocess.run(command, cwd=setup.ROOT, env=common, capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{found.stderr[-2000:]}")
    return Used(**json.loads(found.stdout))


def fill(metrics: Path, count: int) -> None:
    """`count` records up to the checkpoint's step, and REPEATED ones after it."""
    with metrics.open("wb") as file:
        file.writelines(LINE % (1 + nth * STEPS // count, nth) for nth in range(count))
        file.writelines(LINE % (STEPS + 1 + nth, nth) for nth in range(REPEATED))


def measure(run: Path, count: int) -> dict[str, float]:
    metrics = run / "metrics.jsonl"
    fill(metrics, count)
    records = used("-c", RECORDS_ALONE, str(run), str(STEPS))
    report = used("-m", "fsdp.report", str(run), "--no-samples")
    fill(metrics, count)
    start = used("train.py", *FLAGS.split(), "--run.dir", str(run), "--train.steps", str(STEPS))
    return {
        "start_cpu_s": start.cpu_s,
        "start_mib": start.peak_mib,
        "records_cpu_s": records.cpu_s,
        "records_mib": records.peak_mib,
        "report_cpu_s": report.cpu_s,
        "report_mib": report.peak_mib,
    }


def by_steps(counts: Sequence[int], rounds: int) -> tuple[str, dict[str, Any]]:
    numbers: dict[str, list[dict[str, float]]] = {f"{count:,}": [] for count in counts}
    with tempfile.TemporaryDirectory(prefix="bench-steps-") as place:
        run = Path(place, "run")
        used("train.py", *FLAGS.split(), "--run.dir", str(run), "--train.steps", str(STEPS))
        for nth in range(rounds):
            for name in tables.turned(list(numbers), nth):
                numbers[name].append(measure(run, int(name.replace(",", ""))))
                print(f"{name}: {numbers[name][-1]}", flush=True)
    keys = ("start_cpu_s", "start_mib", "records_cpu_s", "records_mib", "report_cpu_s", "report_mib")
    rows = [
        [name, *(tables.spread([one[key] for one in found]) for key in keys)]
        for name, found in numbers.items()
    ]
    columns = [
        "steps recorded",
        "a resume, processor s",
        "its peak MiB",
        "its records alone, processor s",
        "their peak MiB",
        "the report, processor s",
        "its peak MiB",
    ]
    return tables.table(columns, rows), {"by_steps": numbers}
