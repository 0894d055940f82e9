"""The failure of a Ray worker group: the rank's error that caused it, and whether the group is restarted.

Ray restarts the group after any error, `--ray.max_failures` times. FailurePolicy runs in Ray's controller and
ends the run earlier if launch/policy.py decides so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp.base.errors import LaunchError, first_line
from fsdp.base.text import named_ranks
from fsdp.rundir import history
from fsdp.rundir.paths import RunDir
from launch.ray_settings import set_defaults

set_defaults()

from ray.train import UserCallback  # noqa: E402  (after the variables that Ray reads when it is imported)

from launch.policy import EXIT_HUNG, Act, Allocation, End, Kind, Past, decide  # noqa: E402
from launch.slurm_job import hang_ended_newest_start  # noqa: E402


class RankFailed(Exception):
    """The failure of one rank. All values are in args, so that it pickles."""

    def __init__(
        self, rank: int, message: str, exit_code: int, kind: Kind, secondary: bool, trace: str
    ) -> None:
        super().__init__(rank, message, exit_code, kind, secondary, trace)
        self.rank, self.message, self.exit_code = rank, message, exit_code
        self.kind, self.secondary, self.trace = kind, secondary, trace
        """secondary: another rank's failure caused it."""

    def __str__(self) -> str:
        named = f"rank {self.rank}"
        return self.message if self.message.startswith(named) else f"{named}: {self.message}"


@dataclass(frozen=True)
class GroupFailure:
    """The failure of a worker group: that of the rank that failed first."""

    message: str
    exit_code: int
    kind: Kind
    """DIED without an error message: killed, or with its node."""
    trace: str = ""


class RunEnded(Exception):
    """Raised in Ray's controller, where it ends the run.

    GroupFailure's fields are its args, so that it pickles.
    """


def first_failure(failures: Mapping[int, BaseException]) -> GroupFailure:
    """The failure that explains the others: a rank's own error, else a death, else a secondary error."""
    errors = [(rank, _unwrapped(error)) for rank, error in sorted(failures.items())]
    failed = [error for _, error in errors if isinstance(error, RankFailed)]
    first = next((error for error in failed if not error.secondary), None)
    if first is not None:
        return GroupFailure(str(first), first.exit_code, first.kind, first.trace)
    dead = [rank for rank, error in errors if not isinstance(error, RankFailed)]
    if dead:
        died = f"{named_ranks(dead)} died ({_of_death(dict(errors)[dead[0]])})"
        return GroupFailure(died, LaunchError.exit_code, Kind.DIED)
    if failed:
        return GroupFailure(str(failed[0]), failed[0].exit_code, failed[0].kind, failed[0].trace)
    return GroupFailure("the workers failed", LaunchError.exit_code, Kind.DIED)


def _unwrapped(error: BaseException) -> BaseException:
    return getattr(error, "_base_exc", error)


def _of_death(error: BaseException) -> str:
    """The first line of Ray's long text about a death."""
    return first_line(getattr(error, "health_check_failure", error), 160)


def failure_of_fit(error: Any) -> GroupFailure:
    """The failure behind an exception of trainer.fit."""
    cause = getattr(error, "controller_failure", None)
    if isinstance(cause, RunEnded):
        return GroupFailure(*cause.args)
    if cause is not None:
        return GroupFailure(f"Ray's controller failed: {_of_death(cause)}", LaunchError.exit_code, Kind.ERROR)
    return first_failure(getattr(error, "worker_failures", {}))


@dataclass(frozen=True)
class _Progress:
    """How far a run has come, by its records."""

    starts: int
    step: int
    hang_ended_it: bool


def _progress_of(run: RunDir) -> _Progress:
    return _Progress(history.count_starts(run), history.last_step(run), hang_ended_newest_start(run))


class FailurePolicy(UserCallback):
    """Logs a failure of the group once, and ends the run if the policy decides so."""

    def __init__(self, run: Path, logs: Path, max_failures: int) -> None:
        self._run, self._logs, self._max = RunDir(run), logs, max_failures
        self._crashes: list[End] = []
        self._starts = history.count_starts(self._run)

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        failure, reached = first_failure(worker_exceptions), _progress_of(self._run)
        if failure.kind is Kind.DIED and reached.hang_ended_it:
            # Ray does not pass the exit code of a worker on
            failure = dataclasses.replace(failure, exit_code=EXIT_HUNG)
        before, self._starts = self._starts, reached.starts
        end = End(
            failure.kind,
            reached.step,
            self._starts == before,
            failure.exit_code,
            failure.message,
        )
        # Ray itself counts max_failures
        decision = decide(end, Past(crashes=self._crashes), Allocation())
        if decision.act is Act.END:
            # FINAL: a job script around the driver does not restart what the policy has ended
            kind = end.kind if end.kind is Kind.REFUSED else Kind.FINAL
            raise RunEnded(failure.message, decision.code, kind, failure.trace)
        self._crashes.append(end)
        failed = len(self._crashes)
        if self._max < 0 or failed <= self._max:
            self._log(f"{failure.message}, {end.where}; restarting the workers ({failed} of {self._max})")

    def _log(self, line: str) -> None:
        with (self._logs / "controller.err").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
