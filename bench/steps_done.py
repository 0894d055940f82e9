"""A start, its records and a report against the steps that a run has done, for bench/scale.py.

One real run of STEPS steps, whose metrics.jsonl is filled with a record of each step. For a start they
repeat the steps up to the last one, so that the run's own checkpoint is the one to resume; the report reads
them with the steps' own numbers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import tables
from bench.peers import setup

STEPS, REPEATED = 10, 100
HEADS = {
    "metrics_mib": "metrics.jsonl, MiB", "start_cpu_s": "a resume, processor s",
    "start_mib": "its peak MiB", "records_cpu_s": "its records alone, processor s",
    "records_mib": "their peak MiB", "report_cpu_s": "the report, processor s", "report_mib": "its peak MiB",
}  # fmt: skip

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


def used(*words: str, environment: Mapping[str, str] | None = None) -> Used:
    """Started from a small process: Linux counts the memory of the process that forks in its child's peak."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(setup.ROOT), **(environment or {})}
    command = [sys.executable, "-c", FROM_A_SMALL_PROCESS, sys.executable, *words]
    found = subprocess.run(command, cwd=setup.ROOT, env=common, capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{found.stderr[-2000:]}")
    return Used(**json.loads(found.stdout))


def fill(metrics: Path, steps: int) -> None:
    with metrics.open("wb") as file:
        file.writelines(LINE % (step, step) for step in range(1, steps + 1))


def fill_repeated(metrics: Path, count: int) -> None:
    """`count` records up to the checkpoint's step, and REPEATED ones after it."""
    with metrics.open("wb") as file:
        file.writelines(LINE % (1 + nth * STEPS // count, nth) for nth in range(count))
        file.writelines(LINE % (STEPS + 1 + nth, nth) for nth in range(REPEATED))


def measure(run: Path, steps: int) -> dict[str, float]:
    metrics = run / "metrics.jsonl"
    fill(metrics, steps)
    mib = metrics.stat().st_size / 2**20
    report = used("-m", "fsdp.report", str(run), "--no-samples")
    fill_repeated(metrics, steps)
    records = used("-c", RECORDS_ALONE, str(run), str(STEPS))
    fill_repeated(metrics, steps)
    start = used("train.py", *FLAGS.split(), "--run.dir", str(run), "--train.steps", str(STEPS))
    return {
        "metrics_mib": mib,
        "start_cpu_s": start.cpu_s,
        "start_mib": start.peak_mib,
        "records_cpu_s": records.cpu_s,
        "records_mib": records.peak_mib,
        "report_cpu_s": report.cpu_s,
        "report_mib": report.peak_mib,
    }


def by_steps(counts: Sequence[int], rounds: int) -> tuple[str, dict[str, Any]]:
    numbers: dict[str, list[dict[str, float]]] = {f"{steps:,}": [] for steps in counts}
    with tempfile.TemporaryDirectory(prefix="bench-steps-") as place:
        run = Path(place, "run")
        used("train.py", *FLAGS.split(), "--run.dir", str(run), "--train.steps", str(STEPS))
        for nth in range(rounds):
            for steps in tables.turned(counts, nth):
                numbers[f"{steps:,}"].append(measure(run, steps))
                print(f"{steps:,}: {numbers[f'{steps:,}'][-1]}", flush=True)
    return steps_table(numbers, counts), {"by_steps": numbers, "sizes": [*counts]}


def steps_table(numbers: Mapping[str, Sequence[Mapping[str, float]]], sizes: Sequence[int]) -> str:
    grouped = [numbers[f"{size:,}"] for size in sizes]
    rows = [
        [name, *(tables.spread([one[key] for one in found]) for key in HEADS)]
        for name, found in numbers.items()
    ]
    rows.append([tables.SLOPE, *(tables.slope_of(sizes, grouped, key) for key in HEADS)])
    return tables.table(["steps done", *HEADS.values()], rows)
