"""The failure of a Ray worker group: the rank's error that caused it, and whether the group is restarted.

Ray restarts the group after any error, `--ray.max_failures` times. FailurePolicy runs in Ray's controller and
ends the run earlier if launch/policy.py decides so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp.base.errors import LaunchError, ShardrunError, first_line
from fsdp.base.text import named_ranks
from fsdp.rundir import history
from fsdp.rundir.paths import RunDir
from launch.marker import Failure
from launch.ray_cluster import set_defaults

set_defaults()

from ray.train import UserCallback  # noqa: E402  (after the variables that Ray reads when it is imported)

from launch.policy import EXIT_HUNG, Act, Allocation, End, Kind, Past, decide  # noqa: E402
from launch.slurm_job import hang_ended_newest_start  # noqa: E402


class RankFailed(Exception):
    """The failure of one rank. All values are in args, so that it pickles."""

    def __init__(self, rank: int, failure: Failure) -> None:
        super().__init__(rank, failure)
        self.rank, self.failure = rank, failure

    def __str__(self) -> str:
        named, message = f"rank {self.rank}", self.failure.message
        return message if message.startswith(named) else f"{named}: {message}"


class RunEnded(Exception):
    """Raised in Ray's controller, where it ends the run: the group's failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


class WorkersFailed(ShardrunError):
    """The failure of the worker group, with the exit code of the rank that failed first."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.exit_code, self.kind, self.trace = failure.code, failure.kind, failure.trace


def first_failure(failures: Mapping[int, BaseException]) -> Failure:
    """The failure that explains the others: a rank's own error, else a death, else a consequence."""
    errors = {rank: getattr(error, "_base_exc", error) for rank, error in sorted(failures.items())}
    failed = [error for error in errors.values() if isinstance(error, RankFailed)]
    dead = [rank for rank, error in errors.items() if not isinstance(error, RankFailed)]
    own = [error for error in failed if not error.failure.echo]
    if not own and dead:
        died = f"{named_ranks(dead)} died ({_of_death(errors[dead[0]])})"
        return Failure(Kind.DIED, LaunchError.exit_code, died)
    if not failed:
        return Failure(Kind.DIED, LaunchError.exit_code, "the workers failed")
    first = (own or failed)[0]
    return dataclasses.replace(first.failure, message=str(first))


def _of_death(error: BaseException) -> str:
    """The first line of Ray's long text about a death."""
    return first_line(getattr(error, "health_check_failure", error), 160)


def failure_of_fit(error: Any) -> WorkersFailed:
    """The failure behind an exception of trainer.fit."""
    cause = getattr(error, "controller_failure", None)
    if isinstance(cause, RunEnded):
        return WorkersFailed(cause.failure)
    if cause is not None:
        message = f"Ray's controller failed: {_of_death(cause)}"
        return WorkersFailed(Failure(Kind.ERROR, LaunchError.exit_code, message))
    return WorkersFailed(first_failure(getattr(error, "worker_failures", {})))


class FailurePolicy(UserCallback):
    """Logs a failure of the group once, and ends the run if the policy decides so."""

    def __init__(self, run: Path, logs: Path, max_failures: int) -> None:
        self._run, self._logs, self._max = RunDir(run), logs, max_failures
        self._crashes: list[End] = []
        self._starts = history.count_starts(self._run)

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        failure = first_failure(worker_exceptions)
        if failure.kind is Kind.DIED and hang_ended_newest_start(self._run):
            # Ray does not pass the exit code of a worker on
            failure = dataclasses.replace(failure, code=EXIT_HUNG)
        before, self._starts = self._starts, history.count_starts(self._run)
        starting, step = self._starts == before, history.last_step(self._run)
        end = End(failure.kind, step, starting, failure.code, failure.message)
        decision = decide(end, Past(crashes=self._crashes), Allocation())  # Ray itself counts max_failures
        if decision.act is Act.END:
            # FINAL: a job script around the driver does not restart what the policy has ended
            kind = end.kind if end.kind is Kind.REFUSED else Kind.FINAL
            raise RunEnded(dataclasses.replace(failure, kind=kind, code=decision.code))
        self._crashes.append(end)
        count = len(self._crashes)
        if self._max < 0 or count <= self._max:
            line = f"{failure.message}, {end.where}; restarting the workers ({count} of {self._max})"
            with (self._logs / "controller.err").open("a", encoding="utf-8") as file:
                file.write(line + "\n")
