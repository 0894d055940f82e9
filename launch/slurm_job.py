"""What a Slurm job does before its ranks start and after they end. launch/policy.py decides; the run
directory has the facts.

    python -m launch.slurm_job begin --default-run-dir runs/NAME [flags of train.py]    checks them; prints the run directory
    python -m launch.slurm_job judge RUN --job 12 --code 1      after the ranks have ended; its exit status is the decision

The decision is an exit status because that crosses a container's edge: the shell outside acts on it. Both
commands hold the run directory's lock while they write, and write nothing where another job holds it.
Requeueing itself is slurm/lib.sh's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp import config as configuration
from fsdp.base.errors import ConfigError, RefusedError, ShardrunError
from fsdp.dist.env import slurm_start
from fsdp.rundir import history
from fsdp.rundir.lock import Claim
from fsdp.rundir.paths import RunDir
from launch.marker import TOKEN, Marker
from launch.policy import EXIT_REFUSED, Act, Allocation, Decision, End, Kind, Past, decide, kind_of_stop

REQUEUE, AGAIN = 85, 86
"""The exit status for these; any other is the job's own exit code."""
Event = dict[str, Any]


@contextmanager
def holding(run: RunDir, start: str) -> Iterator[None]:
    """The run directory's lock, or RefusedError with its holder. A later start of a Slurm job takes over from
    an earlier.
    """
    claim = Claim.acquire(run.path, "launch.slurm_job", start)
    try:
        yield
    finally:
        claim.release()


def judge(
    run: RunDir, *, job: str, restart: int, code: int, allocation: Allocation, unmet: bool = False
) -> Decision:
    """Decide what follows the last start; a crash or a missed meeting is written into the history."""
    after_this_try = slurm_start(
        {**os.environ, "SHARDRUN_TRY": str(int(os.environ.get("SHARDRUN_TRY", "0")) + 1)}
    )
    try:
        with holding(run, after_this_try):
            return _judge(run, job, restart, code, allocation, unmet)
    except RefusedError as error:
        return decide(End(Kind.REFUSED, why=str(error)), Past(), allocation)


def _judge(run: RunDir, job: str, restart: int, code: int, allocation: Allocation, unmet: bool) -> Decision:
    events = history.events(run)
    past = past_of(events, job, restart)
    if unmet:
        history.record_unmet(run, job=job)
        return decide(End(Kind.UNMET), past, allocation)
    if run.done.exists():
        return decide(End(Kind.DONE), past, allocation)
    if run.stopped.exists():
        reason = run.stopped.read_text(encoding="utf-8").partition(" at step ")[0].strip()
        return decide(End(kind_of_stop(reason), why=reason), past, allocation)
    end = end_of(run, Marker(run, os.environ.get(TOKEN, "")), code, starting=_failed_while_starting(events))
    history.record_crash(
        run,
        job=job,
        restart=restart,
        step=end.step,
        code=end.code,
        kind=end.kind.name,
        starting=end.starting,
    )
    return decide(end, past, allocation)


def end_of(run: RunDir, marker: Marker, code: int, *, starting: bool) -> End:
    """A start that failed, by what its ranks wrote into RUN/FAILED and otherwise by its exit code."""
    said = marker.read()
    if said is not None:
        return End(said.kind, history.last_step(run), starting, said.code, said.message)
    # a refusal leaves no marker, nor does a mistake that is found before there is a run directory
    kind = {EXIT_REFUSED: Kind.REFUSED, ConfigError.exit_code: Kind.FINAL}.get(code, Kind.DIED)
    return End(
        kind, history.last_step(run), starting, code, "" if kind is Kind.DIED else "see the error above"
    )


def past_of(events: Sequence[Event], job: str, restart: int) -> Past:
    """Of this job alone: the same command submitted again gets new tries."""
    crashes = [event for event in events if event["event"] == "crash" and event["job"] == job]
    ends = [
        # a history written before these two fields existed has neither
        End(
            Kind[event.get("kind", Kind.DIED.name)],
            event["step"],
            event.get("starting", False),
            event["code"],
        )
        for event in crashes
    ]
    unmet = 1
    while unmet <= len(events) and events[-unmet]["event"] == "unmet":
        unmet += 1
    here = sum(event["restart"] == restart for event in crashes)
    return Past(ends, here, _stops_without_a_step(events), unmet)


def _failed_while_starting(events: Sequence[Event]) -> bool:
    """Whether the newest try left no start of its own behind."""
    for event in reversed(events):
        if event["event"] in ("start", "crash", "lost", "unmet"):
            return bool(event["event"] != "start")
    return True


def _stops_without_a_step(events: Sequence[Event]) -> int:
    """Starts at the history's end that were asked to stop at the step that they began from."""
    count, end_step = 0, None
    for event in reversed(events):
        if event["event"] == "end":
            end_step = event["step"]
        elif event["event"] == "start" and end_step is not None and end_step <= event["from_step"]:
            count, end_step = count + 1, None
        elif event["event"] in ("start", "crash"):
            break
    return count


def begin(flags: Sequence[str], default_run_dir: str, *, log: str = "", dry_run: bool = False) -> RunDir:
    """Check the flags and remove what the last start left about its end; a start without an end gets one."""
    config = configuration.load(flags)
    run = RunDir(Path(config.run.dir or default_run_dir).absolute())
    if dry_run:
        return run
    with holding(run, slurm_start()):
        if log:
            _link_log(run, log)
        history.remove_markers(run)
        events = history.events(run)
        if events and events[-1]["event"] == "start":
            history.record_lost(run, why="without a message: its node failed, or it was killed before a save")
    return run


def _link_log(run: RunDir, log: str) -> None:
    """The job's log beside the run's other files, whichever folder sbatch was called in."""
    link = run.path / "logs" / Path(log).name
    link.parent.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(link):
        link.symlink_to(log)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launch.slurm_job", description=__doc__.splitlines()[0])
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
    one.add_argument("--no-requeue", action="store_true", help="Slurm does not requeue this job")
    one.add_argument(
        "--no-again", action="store_true", help="the ranks cannot be started again in this allocation"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options, flags = _parser().parse_known_args(argv)
    try:
        if options.command == "begin":
            print(begin(flags, options.default_run_dir, log=options.log, dry_run=options.dry_run).path)
            return 0
        run = RunDir(options.run)
        allocation = Allocation(requeue=not options.no_requeue, again=not options.no_again)
        decision = judge(
            run,
            job=options.job,
            restart=options.restart,
            code=options.code,
            allocation=allocation,
            unmet=options.unmet,
        )
    except ShardrunError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(message(run, decision), flush=True)
    return {Act.REQUEUE: REQUEUE, Act.AGAIN: AGAIN, Act.END: decision.code}[decision.act]


def message(run: RunDir, decision: Decision) -> str:
    """One line for the job's log."""
    if decision.act is Act.REQUEUE:
        return f"{decision.why}. To be requeued."
    if decision.act is Act.AGAIN:
        return f"{decision.why}. Again, in the same allocation."
    if not decision.hint:
        return f"{decision.why}. Not requeued; the same command with --run.dir {run.path} continues."
    return f"{decision.why}: not again. HINT: {decision.hint}; the same command with --run.dir {run.path} continues"


if __name__ == "__main__":
    sys.exit(main())
