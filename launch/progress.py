"""What a job script does next, decided by what the run directory says: on, again, or not again.

    python -m launch.progress begin --default-run-dir runs/NAME [flags of train.py]    checks them; prints the run directory
    python -m launch.progress judge RUN --job 12 --code 1      after the ranks have ended; its exit status is the verdict

The verdict is an exit status because that crosses a container's edge: the shell outside acts on it. Here lie the bounds,
and they count progress: a crash at a new step is tried again, one at the same step as the last is not. Requeueing itself is
slurm/lib.sh's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp import config as configuration
from fsdp import rundir
from fsdp.errors import ShardrunError
from fsdp.phases import StopReason
from fsdp.rundir import RunDir

FINISHED, GIVE_UP, REQUEUE, AGAIN = 0, 1, 85, 86

CRASHES_AT_ONE_STEP = 2
CRASHES_IN_ONE_ALLOCATION = 3
STOPS_WITHOUT_A_STEP = 5
MEETINGS_MISSED = 3
SCHEDULERS_REASONS = (
    StopReason.SIGTERM, StopReason.SIGUSR1, StopReason.SIGUSR2, StopReason.DEADLINE, StopReason.LAUNCHER,
)  # fmt: skip
"""Those that mean: go on later; Ray's launcher hears of nodes that go. Ctrl-C and the stop file are a
person's."""


@dataclass(frozen=True)
class Verdict:
    code: int
    message: str


def judge(run: RunDir, *, job: str, restart: int, code: int) -> Verdict:
    """One look at what the last start left behind; a crash is written into the history."""
    if run.done.exists():
        return Verdict(FINISHED, f"{run.path} is done.")
    if run.stopped.exists():
        return _after_stop(run, run.stopped.read_text(encoding="utf-8").partition(" at step ")[0].strip())
    return _after_crash(run, job, restart, code)


def _after_stop(run: RunDir, reason: str) -> Verdict:
    if StopReason.read(reason) not in SCHEDULERS_REASONS:
        return Verdict(FINISHED, f"stopped: {reason}. Not requeued; the same command with --run.dir {run.path} goes on.")
    idle = _stops_without_a_step(list(rundir.read_records(run.history)))
    if idle >= STOPS_WITHOUT_A_STEP:
        return Verdict(
            GIVE_UP,
            f"stopped {idle} times in a row before a step was done ({reason}): not requeued. "
            "HINT: sbatch --time with more room for the start and the last save",
        )
    return Verdict(REQUEUE, f"stopped: {reason}. To be requeued.")


def _stops_without_a_step(history: Sequence[dict[str, Any]]) -> int:
    """Starts at the history's end that were asked to stop at the step that they began from."""
    count, end_step = 0, None
    for event in reversed(history):
        if event["event"] == "end":
            end_step = event["step"]
        elif event["event"] == "start" and end_step is not None and end_step <= event["from_step"]:
            count, end_step = count + 1, None
        elif event["event"] in ("start", "crash"):
            break
    return count


def unmet(run: RunDir, *, job: str) -> Verdict:
    """Nodes that had met before do not now: one is lost, and Slurm has not noticed yet. A new allocation, a few times."""
    history = list(rundir.read_records(run.history))
    missed = 1
    while missed <= len(history) and history[-missed]["event"] == "unmet":
        missed += 1
    rundir.append(run.history, {"event": "unmet", "time": rundir.now(), "job": job, "step": last_step(run)})
    if missed >= MEETINGS_MISSED:
        return Verdict(GIVE_UP, f"the nodes did not meet, {missed} times in a row: not requeued. HINT: see who is named above")
    return Verdict(REQUEUE, "the nodes did not meet. To be requeued.")


def _after_crash(run: RunDir, job: str, restart: int, code: int) -> Verdict:
    earlier = [event for event in rundir.read_records(run.history) if event["event"] == "crash" and event["job"] == job]
    step = last_step(run)
    run.path.mkdir(parents=True, exist_ok=True)
    crash = {"event": "crash", "time": rundir.now(), "job": job, "restart": restart, "step": step, "code": code}
    rundir.append(run.history, crash)
    where = f"after step {step}" if step else "before its first step"
    same = [event for event in earlier if event["step"] == step]
    if len(same) + 1 >= CRASHES_AT_ONE_STEP:
        return Verdict(
            GIVE_UP,
            f"crashed {len(same) + 1} times {where} (exit code {code}): not again. "
            f"HINT: the first error above says why; the same command with --run.dir {run.path} goes on",
        )
    here = 1 + sum(event["restart"] == restart for event in earlier)
    if here >= CRASHES_IN_ONE_ALLOCATION:
        return Verdict(REQUEUE, f"crashed {where} (exit code {code}), the {here}. time in this allocation. To be requeued.")
    return Verdict(AGAIN, f"crashed {where} (exit code {code}). Again, in the same allocation.")


def last_step(run: RunDir) -> int:
    """The last step that anybody heard of; 0 before the first."""
    return max((int(record["step"]) for record in rundir.read_records(run.metrics)), default=0)


def begin(flags: Sequence[str], default_run_dir: str, *, log: str = "", dry_run: bool = False) -> RunDir:
    """Check the flags, and clear away what the last start said of its end; a start without an end gets one."""
    config = configuration.load(flags)
    run = RunDir(Path(config.run.dir or default_run_dir).absolute())
    if dry_run:
        return run
    if log:
        _link_log(run, log)
    for marker in (run.stopped, run.done):
        marker.unlink(missing_ok=True)
    events = list(rundir.read_records(run.history))
    if events and events[-1]["event"] == "start":
        why = "without a word: its node lost, or killed before it could save"
        rundir.append(run.history, {"event": "lost", "time": rundir.now(), "step": last_step(run), "why": why})
    return run


def _link_log(run: RunDir, log: str) -> None:
    """The job's log beside the run's other files, whichever folder sbatch was called in."""
    link = run.path / "logs" / Path(log).name
    link.parent.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(link):
        link.symlink_to(log)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launch.progress", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("begin")
    first.add_argument("--default-run-dir", required=True)
    first.add_argument("--log", default="", help="the job's log, to be found in the run directory too")
    first.add_argument("--dry-run", action="store_true", help="change nothing")
    one = commands.add_parser("judge")
    one.add_argument("run", type=Path)
    one.add_argument("--job", required=True)
    one.add_argument("--restart", type=int, default=0)
    one.add_argument("--code", type=int, required=True, help="what the step of the ranks ended with")
    one.add_argument("--unmet", action="store_true", help="there were no ranks: the nodes did not meet")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options, flags = _parser().parse_known_args(argv)
    try:
        if options.command == "begin":
            print(begin(flags, options.default_run_dir, log=options.log, dry_run=options.dry_run).path)
            return 0
    except ShardrunError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    run = RunDir(options.run)
    if options.unmet:
        verdict = unmet(run, job=options.job)
    else:
        verdict = judge(run, job=options.job, restart=options.restart, code=options.code)
    print(verdict.message, flush=True)
    return verdict.code


if __name__ == "__main__":
    sys.exit(main())
